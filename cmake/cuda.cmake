# REFIT_CUDA: AUTO builds the CUDA parts where nvcc is found.
set(REFIT_CUDA AUTO CACHE STRING "Build the CUDA parts: AUTO, ON or OFF")
# Kernels for A100 and H100/H200, and code that newer devices compile at start.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
endif()
if(REFIT_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(REFIT_CUDA ON)
  else()
    set(REFIT_CUDA OFF)
  endif()
endif()
if(REFIT_CUDA)
  enable_language(CUDA)
  find_package(CUDAToolkit 12.5 REQUIRED)
  # Said outright: CMake 3.25 takes a newer nvcc's default for C++20. The casts of
  # host and device are one source; they are constexpr.
  add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>
                      $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
  message(STATUS "CUDA ${CUDAToolkit_VERSION}: building the CUDA parts")
else()
  message(STATUS "no CUDA: the CUDA parts are left out")
endif()
