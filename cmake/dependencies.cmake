# The libraries that must be there, looked for together: one message names all that is missing.
find_package(absl QUIET)
find_package(Threads REQUIRED)
find_path(FLATBUFFERS_INCLUDE_DIR flatbuffers/flatbuffers.h)
find_program(FLATC flatc)
find_path(RAPIDJSON_INCLUDE_DIR rapidjson/document.h)
find_path(XXHASH_INCLUDE_DIR xxhash.h)
# LLVM's containers (llvm/ADT), as headers alone: nothing links LLVM.
file(GLOB llvm_folders /usr/lib/llvm-*/include)
find_path(LLVM_ADT_INCLUDE_DIR llvm/ADT/EquivalenceClasses.h HINTS ${llvm_folders})
if(REFIT_BUILD_EXECUTOR)
  find_path(SODIUM_INCLUDE_DIR sodium.h)
  find_library(SODIUM_LIBRARY sodium)
endif()

set(refit_missing)
foreach(need
    "absl_FOUND:libabsl-dev" "FLATBUFFERS_INCLUDE_DIR:libflatbuffers-dev" "FLATC:flatbuffers-compiler"
    "RAPIDJSON_INCLUDE_DIR:rapidjson-dev" "XXHASH_INCLUDE_DIR:libxxhash-dev" "LLVM_ADT_INCLUDE_DIR:llvm-14-dev"
    "SODIUM_LIBRARY:libsodium-dev")
  if(need MATCHES SODIUM AND NOT REFIT_BUILD_EXECUTOR)
    continue()
  endif()
  string(REPLACE ":" ";" need ${need})
  list(GET need 0 variable)
  list(GET need 1 package)
  if(NOT ${variable})
    list(APPEND refit_missing ${package})
  endif()
endforeach()
if(refit_missing)
  list(JOIN refit_missing " " refit_missing)
  message(FATAL_ERROR "libraries are missing. On Debian 12 or Ubuntu 24.04: apt-get install ${refit_missing}")
endif()

# The executor's only cryptography: random numbers and MACs. Shared, as the distribution's static one is not position-independent.
if(REFIT_BUILD_EXECUTOR)
  add_library(refit_sodium INTERFACE)
  add_library(refit::sodium ALIAS refit_sodium)
  target_include_directories(refit_sodium SYSTEM INTERFACE $<BUILD_INTERFACE:${SODIUM_INCLUDE_DIR}>)
  target_link_libraries(refit_sodium INTERFACE $<BUILD_INTERFACE:${SODIUM_LIBRARY}> $<INSTALL_INTERFACE:sodium>)
endif()
