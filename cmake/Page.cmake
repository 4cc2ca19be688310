# llama-server's web page: built from tools/ui with npm when npm is there, else the server has its API only.
# Sets page (built | none) and page_reason, and says them.
set(LLAMA_DFLASH_PAGE "AUTO" CACHE STRING "llama-server's web page: AUTO (when npm can build it), ON or OFF")
set_property(CACHE LLAMA_DFLASH_PAGE PROPERTY STRINGS AUTO ON OFF)

set(page none)
# tools/ui embeds what it finds here, and leaves npm alone as long as it is newer than the sources.
set(page_dir "${CMAKE_CURRENT_BINARY_DIR}/llama.cpp/tools/ui/dist")
if(LLAMA_DFLASH_PAGE STREQUAL "OFF")
  file(REMOVE_RECURSE "${page_dir}")
  set(page_reason "LLAMA_DFLASH_PAGE=OFF")
elseif(LLAMA_DFLASH_PAGE MATCHES "^(AUTO|ON)$")
  execute_process(COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/scripts/page.py"
                          build "${vendor_dir}/llama.cpp/tools/ui" "${page_dir}"
                  OUTPUT_VARIABLE page_reason OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE page_rc)
  if(page_rc EQUAL 0)
    set(page built)
  elseif(NOT page_rc EQUAL 3)
    message(FATAL_ERROR "scripts/page.py failed (${page_rc}), see above; -DLLAMA_DFLASH_PAGE=OFF goes without the web page")
  elseif(LLAMA_DFLASH_PAGE STREQUAL "ON")
    message(FATAL_ERROR "LLAMA_DFLASH_PAGE=ON, but there is no web page: ${page_reason}")
  endif()
else()
  message(FATAL_ERROR "LLAMA_DFLASH_PAGE=${LLAMA_DFLASH_PAGE}, expected AUTO, ON or OFF")
endif()
message(STATUS "llama-dflash: web page: ${page}: ${page_reason}")
if(page STREQUAL "built")
  set(LLAMA_BUILD_UI ON CACHE BOOL "" FORCE)
else()
  set(LLAMA_BUILD_UI OFF CACHE BOOL "" FORCE)
endif()
