# Writes OUT, a C++ file that holds the text of PAGE.
file(READ ${PAGE} text)
string(CONFIGURE [==[// Made from page.html.
#include "report/page.h"

namespace refit::report {

const std::string_view kPage = R"refit_page(@text@)refit_page";

}  // namespace refit::report
]==] source @ONLY)
file(WRITE ${OUT} "${source}")
