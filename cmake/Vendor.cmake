# Make vendor/llama.cpp the pinned tree with the series applied, or take a tree prepared elsewhere.
find_package(Python REQUIRED COMPONENTS Interpreter)
set(LLAMA_DFLASH_VENDOR_DIR "" CACHE PATH "Folder with llama.cpp/ and llama_cpp/, prepared by scripts/vendor.py")
set(LLAMA_DFLASH_PRESET "native" CACHE STRING "Name of the preset, recorded in BUILD_INFO.json")
set(LLAMA_DFLASH_SERIES_DIGEST "" CACHE STRING "Series digest of LLAMA_DFLASH_VENDOR_DIR")

if(LLAMA_DFLASH_PRESET STREQUAL "reference" AND NOT LLAMA_DFLASH_VENDOR_DIR)
  message(FATAL_ERROR "LLAMA_DFLASH_PRESET=reference with LLAMA_DFLASH_VENDOR_DIR not set: vendor/llama.cpp is the patched tree, "
                      "expected the unpatched one; run 'python scripts/native.py build reference'")
endif()

set(vendor_script "${CMAKE_CURRENT_SOURCE_DIR}/scripts/vendor.py")
if(NOT LLAMA_DFLASH_VENDOR_DIR)
  set(vendor_dir "${CMAKE_CURRENT_SOURCE_DIR}/vendor")
  execute_process(COMMAND "${Python_EXECUTABLE}" "${vendor_script}" prepare --dest "${vendor_dir}/llama.cpp"
                  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${Python_EXECUTABLE}" "${vendor_script}" digest
                  OUTPUT_VARIABLE series_digest OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  file(GLOB patches CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/patches/*.patch")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
               ${CMAKE_CURRENT_SOURCE_DIR}/patches/series ${CMAKE_CURRENT_SOURCE_DIR}/vendor/pin.txt ${patches})
else()
  set(vendor_dir "${LLAMA_DFLASH_VENDOR_DIR}")
  set(series_digest "${LLAMA_DFLASH_SERIES_DIGEST}")
endif()

file(STRINGS "${CMAKE_CURRENT_SOURCE_DIR}/vendor/pin.txt" pin_lines)
string(REGEX MATCH "upstream-commit: ([0-9a-f]+)" _ "${pin_lines}")
set(pin_commit "${CMAKE_MATCH_1}")
string(REGEX MATCH "llama-cpp-python==([0-9.]+)" _ "${pin_lines}")
set(pin_bindings "${CMAKE_MATCH_1}")
