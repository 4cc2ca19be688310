# What the wheel and the build cache hold. Everything is in component llama_dflash: upstream's own install rules stay out.
set(pkg llama_dflash)
set(bindings_dir ${pkg}/_vendor/llama_cpp)

install(TARGETS ${llama_libs} LIBRARY DESTINATION ${bindings_dir}/lib COMPONENT llama_dflash)
install(TARGETS ${llama_programs} RUNTIME DESTINATION ${pkg}/bin COMPONENT llama_dflash)
# lib/ is the bindings' own default place, so neither they nor mtmd need an environment variable.
install(DIRECTORY "${vendor_dir}/llama_cpp/" DESTINATION ${bindings_dir} COMPONENT llama_dflash
        FILES_MATCHING PATTERN "*.py" PATTERN "py.typed" PATTERN "LICENSE.md"
        PATTERN "lib" EXCLUDE PATTERN "__pycache__" EXCLUDE)
install(FILES "${vendor_dir}/llama.cpp/LICENSE" DESTINATION ${pkg}/_vendor RENAME LICENSE.llama.cpp COMPONENT llama_dflash)

# what llama-dflash convert runs
install(FILES "${vendor_dir}/llama.cpp/convert_hf_to_gguf.py" DESTINATION ${pkg}/_vendor/convert COMPONENT llama_dflash)
install(DIRECTORY "${vendor_dir}/llama.cpp/conversion" DESTINATION ${pkg}/_vendor/convert COMPONENT llama_dflash
        FILES_MATCHING PATTERN "*.py" PATTERN "__pycache__" EXCLUDE)
install(DIRECTORY "${vendor_dir}/llama.cpp/gguf-py/gguf" DESTINATION ${pkg}/_vendor/convert/gguf-py COMPONENT llama_dflash
        FILES_MATCHING PATTERN "*.py" PATTERN "__pycache__" EXCLUDE)

set(build_type "${CMAKE_BUILD_TYPE}")
set(compiler "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
configure_file("${CMAKE_CURRENT_LIST_DIR}/BUILD_INFO.json.in" BUILD_INFO.json @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/BUILD_INFO.json" DESTINATION ${pkg} COMPONENT llama_dflash)
