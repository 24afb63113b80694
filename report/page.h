// The page that draws the data, as report/page.html has it.
#ifndef REFIT_REPORT_PAGE_H_
#define REFIT_REPORT_PAGE_H_

#include <string_view>

namespace refit::report {

// Holds kDataMark once, where the data belongs.
extern const std::string_view kPage;
inline constexpr std::string_view kDataMark = "REFIT_DATA";

}  // namespace refit::report

#endif  // REFIT_REPORT_PAGE_H_
