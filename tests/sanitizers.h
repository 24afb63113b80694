// Whether the tests are built with a sanitizer, by GCC or by Clang.
#ifndef REFIT_TESTS_SANITIZERS_H_
#define REFIT_TESTS_SANITIZERS_H_

#ifndef REFIT_MORE_WITHOUT_SANITIZER
#error "name MORE_WITHOUT_SANITIZER in the refit_test of what includes this: CI runs the others with a sanitizer alone"
#endif

namespace refit {

#if defined(__has_feature)
#define REFIT_HAS_FEATURE(name) __has_feature(name)
#else
#define REFIT_HAS_FEATURE(name) 0
#endif

// They slow the tests down, so that these should do less.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || \
    REFIT_HAS_FEATURE(address_sanitizer) ||                          \
    REFIT_HAS_FEATURE(thread_sanitizer)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

#undef REFIT_HAS_FEATURE

}  // namespace refit

#endif  // REFIT_TESTS_SANITIZERS_H_
