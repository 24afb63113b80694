# FlatBuffers as the distributions package it: headers and flatc. The runtime we
# use is header-only, and the CMake package's name differs between releases.

# refit_flatbuffers_library(NAME SCHEMA): an INTERFACE target whose users can
# include "<schema>_generated.h". Generated code asserts the exact FlatBuffers
# version, so it is made at build time and never committed. The object API in it
# is for tests, which take plans apart and put them together again.
function(refit_flatbuffers_library name schema)
  get_filename_component(stem ${schema} NAME_WE)
  set(out ${CMAKE_CURRENT_BINARY_DIR}/generated/${stem}_generated.h)
  add_custom_command(
    OUTPUT ${out}
    COMMAND ${FLATC} --cpp --scoped-enums --require-explicit-ids --gen-object-api
            -o ${CMAKE_CURRENT_BINARY_DIR}/generated
            ${CMAKE_CURRENT_SOURCE_DIR}/${schema}
    DEPENDS ${schema} VERBATIM)
  add_custom_target(${name}_generate DEPENDS ${out})
  add_library(${name} INTERFACE)
  add_dependencies(${name} ${name}_generate)
  target_include_directories(${name} SYSTEM INTERFACE
    $<BUILD_INTERFACE:${CMAKE_CURRENT_BINARY_DIR}/generated> $<BUILD_INTERFACE:${FLATBUFFERS_INCLUDE_DIR}>)
endfunction()
