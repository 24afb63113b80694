# REFIT_PRECOMPILE: the headers that most files include are compiled once. With CMAKE_UNITY_BUILD too, a build from nothing
# takes a third of the time.
option(REFIT_PRECOMPILE "Compile the headers that most files include once" OFF)

# Files of one unit of a unity build: a quarter less CPU time in all than CMake's 8.
if(NOT DEFINED CMAKE_UNITY_BUILD_BATCH_SIZE)
  set(CMAKE_UNITY_BUILD_BATCH_SIZE 32)
endif()

# ccache passes files with precompiled headers by, unless it may leave what they define out of its keys.
if(REFIT_PRECOMPILE AND CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
  execute_process(COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} --get-config sloppiness
    OUTPUT_VARIABLE refit_sloppiness ERROR_QUIET)
  if(NOT refit_sloppiness MATCHES "pch_defines" OR NOT refit_sloppiness MATCHES "time_macros")
    message(STATUS "no precompiled headers: for them ccache needs CCACHE_SLOPPINESS=pch_defines,time_macros")
    set(REFIT_PRECOMPILE OFF)
  endif()
endif()

# What most files include.
set(REFIT_COMMON_HEADERS
  <algorithm> <array> <atomic> <chrono> <condition_variable> <cstdint> <cstring> <functional> <limits> <map>
  <memory> <mutex> <numeric> <optional> <set> <string> <string_view> <thread> <tuple> <utility> <vector>
  <absl/container/flat_hash_map.h> <absl/container/flat_hash_set.h> <absl/container/inlined_vector.h>
  <absl/functional/function_ref.h> <absl/status/status.h> <absl/status/statusor.h>
  <absl/strings/str_cat.h> <absl/strings/str_format.h> <absl/strings/str_join.h> <absl/types/span.h>
  <plan_generated.h>)
set(REFIT_COMMON_HEADER_LIBS
  refit_schema absl::flat_hash_map absl::flat_hash_set absl::inlined_vector absl::function_ref absl::statusor
  absl::str_format absl::span)

# Programs are compiled as libraries are, and so with the same precompiled headers.
if(REFIT_PRECOMPILE)
  set(CMAKE_CXX_COMPILE_OPTIONS_PIE -fPIC)
endif()

# refit_precompiled(NAME HEADERS… LIBS…): compiles HEADERS, which LIBS have, for refit_use_precompiled.
function(refit_precompiled name)
  cmake_parse_arguments(arg "" "" "HEADERS;LIBS" ${ARGN})
  if(REFIT_PRECOMPILE)
    # CMake wants a source beside them.
    file(CONFIGURE OUTPUT ${name}.cc CONTENT "")
    add_library(${name} OBJECT ${CMAKE_CURRENT_BINARY_DIR}/${name}.cc)
    target_link_libraries(${name} PRIVATE refit_warnings ${arg_LIBS})
    target_precompile_headers(${name} PRIVATE ${arg_HEADERS})
  endif()
endfunction()

# refit_use_precompiled(NAME TARGET…): every file of TARGET starts with the headers of NAME.
function(refit_use_precompiled name)
  if(REFIT_PRECOMPILE)
    foreach(target ${ARGN})
      target_precompile_headers(${target} REUSE_FROM ${name})
    endforeach()
  endif()
endfunction()
