# REFIT_TAKE_FROM: a build folder of the same compiler. Libraries without threads are taken from it, so that a tree with
# ThreadSanitizer need not compile them again. It sees no access of theirs. They share one thing with threads, the lists of a
# plan's messages: MessageLists::Of loads an atomic pointer, and who writes a list out (refit_plan) and the ranks that read it
# (refit_schedule) are compiled with ThreadSanitizer in each case.
set(REFIT_TAKE_FROM "" CACHE PATH "A build folder from which libraries without threads are taken")

# refit_take(TARGET…): after all that a target links is said. Its own archive stays empty, and who links it links the other one.
function(refit_take)
  if(REFIT_TAKE_FROM STREQUAL "")
    return()
  endif()
  file(CONFIGURE OUTPUT taken.cc CONTENT "")
  foreach(target ${ARGN})
    file(RELATIVE_PATH folder ${PROJECT_BINARY_DIR} ${CMAKE_CURRENT_BINARY_DIR})
    get_target_property(links ${target} INTERFACE_LINK_LIBRARIES)
    add_library(${target}_taken STATIC IMPORTED GLOBAL)
    set_target_properties(${target}_taken PROPERTIES
      IMPORTED_LOCATION ${REFIT_TAKE_FROM}/${folder}/lib${target}.a INTERFACE_LINK_LIBRARIES "${links}")
    set_target_properties(${target} PROPERTIES
      SOURCES ${CMAKE_CURRENT_BINARY_DIR}/taken.cc INTERFACE_LINK_LIBRARIES ${target}_taken)
  endforeach()
endfunction()
