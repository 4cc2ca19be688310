# Install a finished build (an entry of the build cache) as it is.
set(info "${LLAMA_DFLASH_PREBUILT}/llama_dflash/BUILD_INFO.json")
if(NOT EXISTS "${info}")
  message(FATAL_ERROR "LLAMA_DFLASH_PREBUILT=${LLAMA_DFLASH_PREBUILT}: no llama_dflash/BUILD_INFO.json there; "
                      "expected a folder printed by 'python scripts/native.py build native'")
endif()
message(STATUS "llama-dflash: installing the prebuilt ${LLAMA_DFLASH_PREBUILT}")
install(DIRECTORY "${LLAMA_DFLASH_PREBUILT}/llama_dflash/" DESTINATION llama_dflash
        USE_SOURCE_PERMISSIONS COMPONENT llama_dflash)
