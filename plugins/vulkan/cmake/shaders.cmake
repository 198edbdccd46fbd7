# Compiles shaders/variants.txt to SPIR-V. A line is `name source [MACRO[=value] ...] [needs=FEATURE]`; variants whose
# feature this glslc does not know are left out, and spirv/left_out.txt says which and why.

set(SHADER_FOLDER ${CMAKE_CURRENT_SOURCE_DIR}/shaders)
set(SPIRV_FOLDER ${CMAKE_CURRENT_BINARY_DIR}/spirv)

# Sets <result> to whether glslc compiles a shader that uses the feature.
function(qcore_vulkan_knows feature result)
  set(probe ${CMAKE_CURRENT_SOURCE_DIR}/cmake/probes/${feature}.comp)
  if(NOT EXISTS ${probe})
    message(FATAL_ERROR "shaders/variants.txt: nothing tests whether glslc knows needs=${feature}")
  endif()
  execute_process(
    COMMAND ${QCORE_GLSLC} --target-env=vulkan1.3 -o ${CMAKE_CURRENT_BINARY_DIR}/probe.spv ${probe}
    RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
  if(failed)
    message(STATUS "glslc does not know ${feature}")
    set(${result} FALSE PARENT_SCOPE)
  else()
    message(STATUS "glslc knows ${feature}")
    set(${result} TRUE PARENT_SCOPE)
  endif()
endfunction()

# Cooperative matrices need the SPIR-V of Vulkan 1.3; everything else runs on older devices.
function(qcore_vulkan_shader name source macros environment)
  list(TRANSFORM macros PREPEND -D)
  set(output ${SPIRV_FOLDER}/${name}.spv)
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${QCORE_GLSLC} -O --target-env=${environment} -MD -MF ${output}.d -MT ${output} ${macros} -o ${output}
            ${SHADER_FOLDER}/${source}
    DEPENDS ${SHADER_FOLDER}/${source}
    DEPFILE ${output}.d
    COMMENT "SPIR-V ${name}"
    VERBATIM)
endfunction()

function(qcore_vulkan_shaders)
  set(variants ${SHADER_FOLDER}/variants.txt)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${variants})
  file(MAKE_DIRECTORY ${SPIRV_FOLDER})
  file(STRINGS ${variants} lines)
  set(modules "")
  set(left_out "")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "#.*" "" line "${line}")
    string(STRIP "${line}" line)
    if(line STREQUAL "")
      continue()
    endif()
    string(REGEX REPLACE "[ \t]+" ";" words "${line}")
    list(POP_FRONT words name source)
    set(environment vulkan1.1)
    set(known TRUE)
    foreach(word IN LISTS words)
      if(word MATCHES "^needs=(.+)$")
        set(feature ${CMAKE_MATCH_1})
        list(REMOVE_ITEM words ${word})
        set(environment vulkan1.3)
        if(NOT DEFINED knows_${feature})
          qcore_vulkan_knows(${feature} knows_${feature})
        endif()
        set(known ${knows_${feature}})
      endif()
    endforeach()
    if(NOT known)
      string(APPEND left_out "${name} ${feature}\n")
      continue()
    endif()
    qcore_vulkan_shader(${name} ${source} "${words}" ${environment})
    list(APPEND modules ${SPIRV_FOLDER}/${name}.spv)
  endforeach()
  file(WRITE ${SPIRV_FOLDER}/left_out.txt "${left_out}")
  add_custom_target(spirv ALL DEPENDS ${modules})
  install(FILES ${modules} ${SPIRV_FOLDER}/left_out.txt DESTINATION qcore_vulkan/spirv)
endfunction()
