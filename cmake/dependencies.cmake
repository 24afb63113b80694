# The libraries that must be there, looked for together: one message names all that is missing.
find_package(absl QUIET)
find_package(Threads REQUIRED)
find_path(FLATBUFFERS_INCLUDE_DIR flatbuffers/flatbuffers.h)
find_program(FLATC flatc)
find_path(RAPIDJSON_INCLUDE_DIR rapidjson/document.h)
find_path(XXHASH_INCLUDE_DIR xxhash.h)

set(refit_missing)
foreach(need
    "absl_FOUND:libabsl-dev" "FLATBUFFERS_INCLUDE_DIR:libflatbuffers-dev" "FLATC:flatbuffers-compiler"
    "RAPIDJSON_INCLUDE_DIR:rapidjson-dev" "XXHASH_INCLUDE_DIR:libxxhash-dev")
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
