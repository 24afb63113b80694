# REFIT_PYTHON_PACKAGE: AUTO builds the Python package where the headers of
# Python and nanobind are found.
set(REFIT_PYTHON_PACKAGE AUTO CACHE STRING "Build the Python package: AUTO, ON or OFF")
if(REFIT_PYTHON_PACKAGE STREQUAL "AUTO" OR REFIT_PYTHON_PACKAGE)
  # tests/python_venv.sh makes one beside the builds.
  set(refit_venv_python ${PROJECT_SOURCE_DIR}/build/venv/bin/python)
  if(NOT SKBUILD AND NOT DEFINED Python_EXECUTABLE AND EXISTS ${refit_venv_python})
    set(Python_EXECUTABLE ${refit_venv_python})
  endif()
  find_package(Python 3.10 COMPONENTS Interpreter Development.Module
               OPTIONAL_COMPONENTS Development.SABIModule QUIET)
  if(Python_FOUND)
    execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
      OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_package(nanobind CONFIG QUIET)
  endif()
  if(nanobind_FOUND)
    set(REFIT_PYTHON_PACKAGE ON)
    message(STATUS "Python ${Python_VERSION}: building the package")
  elseif(REFIT_PYTHON_PACKAGE STREQUAL "AUTO")
    set(REFIT_PYTHON_PACKAGE OFF)
    message(STATUS "no nanobind: the Python package is left out")
  else()
    message(FATAL_ERROR
      "REFIT_PYTHON_PACKAGE is ON, but the headers of Python or nanobind are not found")
  endif()
endif()
