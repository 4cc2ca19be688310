# The recipe of a build travels in the wheel, so that `--native exact` works from an installed package too.
set(recipe llama_dflash/_recipe)
install(FILES CMakeLists.txt CMakePresets.json DESTINATION ${recipe} COMPONENT llama_dflash)
install(FILES vendor/pin.txt DESTINATION ${recipe}/vendor COMPONENT llama_dflash)
install(FILES scripts/vendor.py scripts/native.py scripts/page.py DESTINATION ${recipe}/scripts COMPONENT llama_dflash)
install(DIRECTORY cmake DESTINATION ${recipe} COMPONENT llama_dflash)
install(DIRECTORY patches DESTINATION ${recipe} COMPONENT llama_dflash FILES_MATCHING PATTERN "series" PATTERN "*.patch")
install(DIRECTORY tests/native/probe DESTINATION ${recipe}/tests/native COMPONENT llama_dflash)
