# What `cmake --install` gives to workers beside the programs: librefit.so and
# refit.h for C, static libraries and headers for C++, and what find_package and
# pkg-config need to find them.
if(NOT REFIT_BUILD_EXECUTOR)
  return()
endif()
include(CMakePackageConfigHelpers)

# refit::refit is the C API; refit::executor the C++ one, with what it is made of.
set_target_properties(refit_shared PROPERTIES EXPORT_NAME refit)
set_target_properties(refit_executor PROPERTIES EXPORT_NAME executor)
set_target_properties(refit_control PROPERTIES EXPORT_NAME control)
set_target_properties(refit_schedule PROPERTIES EXPORT_NAME schedule)
set_target_properties(refit_plan PROPERTIES EXPORT_NAME plan)
set_target_properties(refit_schema PROPERTIES EXPORT_NAME schema)
set_target_properties(refit_sodium PROPERTIES EXPORT_NAME sodium)
install(TARGETS refit_shared refit_executor refit_control refit_schedule refit_plan refit_schema refit_sodium EXPORT refitTargets FILE_SET HEADERS)

file(GLOB headers CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/control/include/refit/*.h ${PROJECT_SOURCE_DIR}/executor/include/refit/*.h)
install(FILES ${headers} DESTINATION ${REFIT_INSTALL_CXX_INCLUDEDIR}/refit)
install(FILES ${PROJECT_SOURCE_DIR}/plan/dtype.h ${PROJECT_SOURCE_DIR}/plan/element_types.h ${PROJECT_SOURCE_DIR}/plan/message_lists.h ${PROJECT_SOURCE_DIR}/plan/plan_file.h
  ${PROJECT_SOURCE_DIR}/plan/vector_length.h
  DESTINATION ${REFIT_INSTALL_CXX_INCLUDEDIR}/plan)
install(FILES ${PROJECT_SOURCE_DIR}/plan/schedule/coded_message.h ${PROJECT_SOURCE_DIR}/plan/schedule/copy_batch.h
  ${PROJECT_SOURCE_DIR}/plan/schedule/operation.h DESTINATION ${REFIT_INSTALL_CXX_INCLUDEDIR}/plan/schedule)
install(FILES ${PROJECT_BINARY_DIR}/schema/generated/plan_generated.h DESTINATION ${REFIT_INSTALL_CXX_INCLUDEDIR})

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/refit)
install(EXPORT refitTargets NAMESPACE refit:: DESTINATION ${package_dir})
configure_package_config_file(cmake/refitConfig.cmake.in ${PROJECT_BINARY_DIR}/refitConfig.cmake
  INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may break the C++ API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/refitConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/refitConfig.cmake ${PROJECT_BINARY_DIR}/refitConfigVersion.cmake
  DESTINATION ${package_dir})

# Relative, so that an installed tree may be moved.
file(RELATIVE_PATH prefix_from_pkgconfig /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/refit.pc.in ${PROJECT_BINARY_DIR}/refit.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/refit.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
