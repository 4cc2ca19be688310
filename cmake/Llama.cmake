# llama.cpp itself: its options, and library names that neither a wheel nor a stock install can confuse.
set(BUILD_SHARED_LIBS ON CACHE BOOL "" FORCE)
set(LLAMA_BUILD_COMMON ON CACHE BOOL "")
set(LLAMA_BUILD_TOOLS ON CACHE BOOL "")
set(LLAMA_BUILD_SERVER ON CACHE BOOL "")
set(LLAMA_BUILD_TESTS OFF CACHE BOOL "")
set(LLAMA_BUILD_EXAMPLES OFF CACHE BOOL "")
set(LLAMA_BUILD_APP OFF CACHE BOOL "")
set(LLAMA_USE_PREBUILT_UI OFF CACHE BOOL "")   # ON would download during the build
set(LLAMA_OPENSSL OFF CACHE BOOL "")
set(GGML_BUILD_TESTS OFF CACHE BOOL "")
set(GGML_BUILD_EXAMPLES OFF CACHE BOOL "")
# Else the commit of this repository would be baked in.
set(LLAMA_BUILD_COMMIT "${pin_commit}" CACHE STRING "" FORCE)
set(LLAMA_BUILD_NUMBER 0 CACHE STRING "" FORCE)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

add_subdirectory("${vendor_dir}/llama.cpp" llama.cpp EXCLUDE_FROM_ALL)

set(llama_libs ggml-base ggml ggml-cpu llama llama-common mtmd
    llama-server-impl llama-cli-impl llama-bench-impl llama-quantize-impl llama-perplexity-impl)
if(TARGET ggml-cuda)
  list(APPEND llama_libs ggml-cuda)
endif()
set(llama_programs llama-server llama-cli llama-bench llama-quantize llama-perplexity)
add_custom_target(llama_dflash_all ALL DEPENDS ${llama_libs} ${llama_programs})

foreach(lib IN LISTS llama_libs)
  # A wheel has no symlinks (a versioned library would be stored three times), and equal SONAMEs
  # would bind to a stock install's libraries in the same process.
  set_property(TARGET ${lib} PROPERTY VERSION)
  set_property(TARGET ${lib} PROPERTY SOVERSION)
  set_target_properties(${lib} PROPERTIES INSTALL_RPATH "$ORIGIN" BUILD_WITH_INSTALL_RPATH OFF)
endforeach()
foreach(program IN LISTS llama_programs)
  set_target_properties(${program} PROPERTIES INSTALL_RPATH "$ORIGIN/../_vendor/llama_cpp/lib")
endforeach()
