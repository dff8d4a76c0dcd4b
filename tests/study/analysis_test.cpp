// Theory: a Pareto front is what a brute force over all pairs leaves; a parameter's share is the
// between-group sum of squares over the total, which for an additive function on a full grid is known; a
// contrast compares levels with all else equal, and is won by what exceeds the error of such figures and
// fails no requests; and the report says what is there, within 100 columns.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "sim/core/random.hpp"
#include "tools/study/analysis.hpp"

namespace pdsim {
namespace {

using Values = std::vector<std::optional<double>>;

Values column(std::initializer_list<double> values) {
  return {values.begin(), values.end()};
}

TEST(Analysis, TheParetoFrontAgainstBruteForce) {
  Random random(1, Purpose::sampling);
  for (const std::size_t columns : {std::size_t{1}, std::size_t{2}, std::size_t{3}, std::size_t{5}}) {
    bool less[5];
    for (std::size_t c = 0; c < columns; ++c) less[c] = c % 2 == 0;
    for (int round = 0; round < 30; ++round) {
      std::vector<Values> rows(60);
      for (Values& row : rows) {
        for (std::size_t c = 0; c < columns; ++c) {
          row.push_back(static_cast<double>(random.below(12)));  // ties are common
          if (random.below(25) == 0) row.back().reset();
        }
      }
      const auto whole = [](const Values& row) {
        return std::ranges::all_of(row, [](const auto& v) { return v.has_value(); });
      };
      std::vector<std::size_t> expected;
      for (std::size_t i = 0; i < rows.size(); ++i) {
        bool beaten = !whole(rows[i]);
        for (std::size_t j = 0; j < rows.size() && !beaten; ++j) {
          if (!whole(rows[j])) continue;
          bool no_worse = true, better = false;
          for (std::size_t c = 0; c < columns; ++c) {
            const double a = *rows[j][c], b = *rows[i][c];
            no_worse = no_worse && (less[c] ? a <= b : a >= b);
            better = better || (less[c] ? a < b : a > b);
          }
          beaten = no_worse && better;
        }
        if (!beaten) expected.push_back(i);
      }
      EXPECT_EQ(pareto_front(rows, std::span<const bool>(less, columns)), expected) << columns << " columns";
    }
  }
}

TEST(Analysis, TheBestOfEqualsIsTheFirst) {
  Values values = column({3, 1, 2, 1});
  EXPECT_EQ(best_of(values, true), 1u);
  EXPECT_EQ(best_of(values, false), 0u);
  values[1].reset();
  EXPECT_EQ(best_of(values, true), 3u);
  EXPECT_EQ(best_of(Values(3), true), std::nullopt);
}

// f = 3 a + b over {0, 1} x {0, 1, 2}: Var(3a) = 9/4, Var(b) = 2/3; the shares are those over their sum, and
// what a product a b adds is in neither.
TEST(Analysis, SharesOfAnAdditiveFunction) {
  Values additive, product;
  std::vector<std::uint32_t> a, b;
  for (std::uint32_t i = 0; i < 2; ++i) {
    for (std::uint32_t j = 0; j < 3; ++j) {
      additive.emplace_back(3.0 * i + j);
      product.emplace_back((i - 0.5) * (j - 1.0));
      a.push_back(i);
      b.push_back(j);
    }
  }
  EXPECT_NEAR(*explained(additive, a), (9 / 4.) / (9 / 4. + 2 / 3.), 1e-12);
  EXPECT_NEAR(*explained(additive, b), (2 / 3.) / (9 / 4. + 2 / 3.), 1e-12);
  EXPECT_NEAR(*explained(product, a), 0, 1e-12);
  EXPECT_NEAR(*explained(product, b), 0, 1e-12);
  additive[0].reset();  // the rest still has a share, of five values: 0.5 + 1.5 x 4 ... against a brute force
  double mean = 0, total = 0, between = 0;
  for (std::size_t i = 1; i < 6; ++i) mean += *additive[i] / 5;
  for (std::size_t i = 1; i < 6; ++i) total += (*additive[i] - mean) * (*additive[i] - mean);
  const double low = (1 + 2) / 2., high = (3 + 4 + 5) / 3.;
  between = 2 * (low - mean) * (low - mean) + 3 * (high - mean) * (high - mean);
  EXPECT_NEAR(*explained(additive, a), between / total, 1e-12);
  EXPECT_EQ(explained(column({2, 2, 2}), std::vector<std::uint32_t>{0, 1, 2}), std::nullopt);
  EXPECT_EQ(explained(column({2}), std::vector<std::uint32_t>{0}), std::nullopt);
}

// Many numeric levels are eight groups of even sizes along the axis, whatever their order; words never are.
TEST(Analysis, GroupsOfManyLevels) {
  Parameter parameter;
  parameter.numeric = true;
  for (const int x : {8, 1, 4, 2}) parameter.labels.push_back(std::to_string(x));
  EXPECT_EQ(groups_of(parameter), (std::vector<std::uint32_t>{0, 1, 2, 3}));
  parameter.labels.clear();
  for (int x = 40; x > 0; --x) parameter.labels.push_back(std::to_string(x));
  const std::vector<std::uint32_t> groups = groups_of(parameter);
  EXPECT_EQ(groups[39], 0u);  // 1
  EXPECT_EQ(groups[0], 7u);   // 40
  for (std::uint32_t g = 0; g < 8; ++g) EXPECT_EQ(std::ranges::count(groups, g), 5);
  EXPECT_TRUE(std::is_sorted(groups.rbegin(), groups.rend()));
  parameter.numeric = false;
  EXPECT_EQ(groups_of(parameter).back(), 39u);
}

/// A grid of made-up results.
struct Made {
  Space space;
  std::vector<ResultRow> rows;
};

Made made(const std::vector<std::pair<std::string, std::vector<std::string>>>& parameters,
          const std::vector<Objective>& objectives,
          const std::function<Values(const std::vector<std::uint32_t>&)>& values) {
  Made out;
  out.space.name = "made";
  out.space.objectives = objectives;
  std::size_t n = 1;
  for (const auto& [name, labels] : parameters) {
    Parameter& parameter = out.space.parameters.emplace_back();
    parameter.name = name;
    parameter.labels = labels;
    parameter.numeric = labels[0][0] >= '0' && labels[0][0] <= '9';
    n *= labels.size();
  }
  for (std::size_t i = 0; i < n; ++i) {
    SweepPoint point{i, std::vector<std::uint32_t>(parameters.size())};
    ResultRow row;
    row.point = i;
    row.finished = true;
    for (std::size_t p = parameters.size(), rest = i; p-- > 0;) {
      point.levels[p] = static_cast<std::uint32_t>(rest % parameters[p].second.size());
      rest /= parameters[p].second.size();
    }
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      row.labels.push_back(parameters[p].second[point.levels[p]]);
    }
    row.objectives = values(point.levels);
    out.space.points.push_back(std::move(point));
    out.rows.push_back(std::move(row));
  }
  return out;
}

const Objective kUsd = find_objective("usd_per_request_in_slo", "test");
const Objective kTtft = find_objective("ttft_p95", "test");
const Objective kGoodput = find_objective("goodput", "test");

TEST(Analysis, AContrastComparesWithAllElseEqual) {
  Made m = made({{"rate", {"1", "2", "4"}}, {"deployment", {"colocated", "split"}}}, {kUsd, kGoodput},
                [](const std::vector<std::uint32_t>& at) {
                  const double usd = at[1] == 0 ? 1 + at[0] : 2;  // equal at rate 2
                  return Values{usd, 1 / usd};
                });
  std::vector<ContrastCell> cells = contrast_cells(m.space, 1, 0, m.rows);
  ASSERT_EQ(cells.size(), 3u);
  EXPECT_EQ(cells[0].best, 0u);
  EXPECT_DOUBLE_EQ(*cells[0].margin, 0.5);  // 1 against 2
  EXPECT_DOUBLE_EQ(*cells[1].margin, 0);
  EXPECT_EQ(cells[2].best, 1u);
  EXPECT_DOUBLE_EQ(*cells[2].margin, 1 / 3.);
  EXPECT_EQ(cells[2].levels, (std::vector<std::uint32_t>{2, 0}));

  cells = contrast_cells(m.space, 1, 1, m.rows);  // more is better
  EXPECT_EQ(cells[0].best, 0u);
  EXPECT_DOUBLE_EQ(*cells[0].margin, 1);  // 1 against 0.5
  EXPECT_EQ(cells[2].best, 1u);

  m.rows[0].finished = false;        // failed: the other has it alone
  m.rows[4].objectives[0].reset();   // nobody met the SLO
  m.rows.erase(m.rows.begin() + 3);  // has not run: nothing is said of its cell
  cells = contrast_cells(m.space, 1, 0, m.rows);
  EXPECT_EQ(cells[0].best, 1u);
  EXPECT_EQ(cells[0].margin, std::nullopt);
  EXPECT_EQ(cells[0].missing, 1u);
  EXPECT_EQ(cells[1].best, std::nullopt);
  EXPECT_EQ(cells[1].open, 1u);
  EXPECT_EQ(cells[2].best, 1u);
  EXPECT_EQ(cells[2].present, 1u);
}

void expect_tidy(const std::string& report) {
  std::size_t from = 0;
  while (from < report.size()) {
    const std::size_t end = report.find('\n', from);
    ASSERT_NE(end, std::string::npos) << "the last line does not end";
    EXPECT_LE(end - from, 100u) << report.substr(from, end - from);
    EXPECT_FALSE(end > from && report[end - 1] == ' ') << report.substr(from, end - from);
    from = end + 1;
  }
  EXPECT_EQ(report.find("\n\n\n"), std::string::npos) << report;
}

// Line ends, and what the next line is indented by, are one blank: where a line ends says nothing.
std::string unfolded(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == ' ' && out.ends_with('\n')) continue;
    out += c;
  }
  std::ranges::replace(out, '\n', ' ');
  return out;
}

// Each part is there whole and once: its lines one after the other, to the last blank between columns, and no
// longer number, word or line in its place.
void expect_in(const std::string& report, const std::vector<std::string>& parts) {
  const std::string text = fmt::format(" {} ", unfolded(report));
  for (const std::string& part : parts) {
    const std::string sought = fmt::format(" {} ", unfolded(part));
    const std::size_t at = text.find(sought);
    EXPECT_NE(at, std::string::npos) << part << "\nis not in\n" << report;
    EXPECT_EQ(at, text.rfind(sought)) << part << "\nis twice in\n" << report;
  }
}

// A latency is of completed requests alone: the setting that fails a tenth is the fastest, and wins nothing
// by latency; by dollars within the SLO, where what fails counts, it does. A thousandth less is no less.
TEST(Analysis, WhatFailsRequestsWinsNoLatency) {
  Made m = made({{"rate", {"1", "2"}}, {"ttl", {"short", "long", "longer"}}}, {kTtft, kUsd},
                [](const std::vector<std::uint32_t>& at) {
                  return Values{100.0 * (1 + at[1]), 1.0 + at[0] + at[1]};
                });
  m.rows[0].completed = 0.9;
  m.rows[3].completed = 0.9;
  m.rows[4].completed = 0.9;
  m.rows[5].completed = 0.9;
  m.rows[1].completed = 0.9992;
  const std::vector<Values> values = comparable(m.space, m.rows);
  EXPECT_EQ(values[0], (Values{std::nullopt, 1.0}));
  EXPECT_EQ(values[1], (Values{200.0, 2.0}));
  EXPECT_EQ(values[2], (Values{300.0, 3.0}));
  EXPECT_EQ(values[5], (Values{std::nullopt, 4.0}));
  std::vector<ContrastCell> cells = contrast_cells(m.space, 1, 0, m.rows);
  EXPECT_EQ(cells[0].best, 1u);
  EXPECT_EQ(cells[0].incomplete, 1u);
  EXPECT_EQ(cells[0].present, 2u);
  EXPECT_EQ(cells[1].best, 0u) << "all of the cell complete as many";
  EXPECT_EQ(cells[1].incomplete, 0u);
  cells = contrast_cells(m.space, 1, 1, m.rows);
  EXPECT_EQ(cells[0].best, 0u);
  EXPECT_EQ(cells[0].incomplete, 0u);
  for (const auto& [path, latency] :
       {std::pair("min:stages_ms.prefill.p99", true), std::pair("min:latency_ms.itl.p50", true),
        std::pair("max:cache.remote_hit_tokens", false)}) {
    EXPECT_EQ(is_latency(find_objective(path, "test")), latency) << path;
  }
  m.space.contrasts = {{1, kTtft}};
  const std::string report = sweep_report(m.space, m.rows);
  expect_tidy(report);
  const std::string left_out = R"(4 points left out: they completed fewer requests (down to 90 %) than the
      best 100 %, and a latency is of completed requests alone)";
  const std::string front = "Pareto front of ttft_p95, usd_per_request_in_slo: 1 of 6 points\n";
  const std::string best = "ttft_p95 (time to first token, ms, 95th percentile): best 200 at point 1\n";
  expect_in(report, {front + left_out, best + "rate 1, ttl long\n" + left_out,
                     R"(point  rate   ttl  ttft_p95  usd_per_request_in_slo
                        1         1  long       200                       2)",
                     R"(usd_per_request_in_slo (dollars billed per request within the SLO): best 1 at point 0
                        rate 1, ttl short)",
                     // 200 against 300, and where all fail as many 100 against 200
                     R"(rate     1     2
                        L 33  S 50
                        S short, L long, O longer; the number is the margin over the second best in %)",
                     R"(short wins 1 of 2 cells, by 50 %; long 1, by 33 %; longer none; 1 point not compared,
                        since it completed fewer requests than others in its cell.)"});
}

// A margin of a fifth counts where figures are off by a tenth, on either side, and not where by a third; a
// tie is one whatever the error. The last is ahead of the second by enough, and of the third by less than its
// error.
TEST(Analysis, AMarginWithinTheErrorDecidesNothing) {
  Made m = made({{"rate", {"1", "2", "4", "8", "16"}}, {"mode", {"pull", "push", "both"}}}, {kUsd},
                [](const std::vector<std::uint32_t>& at) {
                  const double usd[] = {0.8, 1, 1.01};
                  return Values{usd[at[1]]};
                });
  for (ResultRow& row : m.rows) row.errors = {0.1};
  m.rows[4].errors = {1 / 3.};
  m.rows[6].errors = {1 / 3.};
  m.rows[9].errors = {1 / 3.};
  m.rows[9].objectives[0] = 1.0;
  m.rows[10].objectives[0] = 1.001;
  m.rows[11].objectives[0] = 1.002;
  m.rows[14].errors = {1 / 3.};
  m.space.contrasts = {{1, kUsd}};
  const auto undecided = [&] {
    std::vector<bool> out;
    for (const ContrastCell& cell : contrast_cells(m.space, 1, 0, m.rows)) out.push_back(cell.undecided);
    return out;
  };
  EXPECT_EQ(undecided(), (std::vector<bool>{false, true, true, false, true}));
  const std::string report = sweep_report(m.space, m.rows);
  expect_tidy(report);
  expect_in(
      report,
      {"rate     1      2      4  8     16\nP 20  ?P 20  ?P 20  =  ?P 20\nP pull, U push, B both, = a tie, "
       "within 0.5 %, ? UNDECIDED, though ahead: by less than such figures miss measured ones; the number "
       "is the margin over the second best in %",
       "pull wins 1 of 5 cells, by 20 %; push none; both none; 1 a tie, within 0.5 %; 3 UNDECIDED, by less "
       "than such figures miss measured ones in the median."});
  // What no measurement bounds decides nothing either, as in compare: of all rows, or of one in a cell.
  for (ResultRow& row : m.rows) row.errors = {std::nan("")};
  EXPECT_EQ(undecided(), (std::vector<bool>{true, true, true, false, true}));
  expect_in(
      sweep_report(m.space, m.rows),
      {"none wins any of 5 cells; 1 a tie, within 0.5 %; 4 UNDECIDED, since nothing measured says by how "
       "much such figures are off.",
       "? UNDECIDED, though ahead: nothing measured says by how much they are off; the number is the margin "
       "over "
       "the second best in %"});
  for (ResultRow& row : m.rows) row.errors = {0.1};
  m.rows[2].errors = {std::nan("")};
  m.rows[3].errors = {1 / 3.};
  EXPECT_EQ(undecided(), (std::vector<bool>{true, true, false, false, false}));
  expect_in(
      sweep_report(m.space, m.rows),
      {"pull wins 2 of 5 cells, by 20 %; push none; both none; 1 a tie, within 0.5 %; 1 UNDECIDED, by less "
       "than such figures miss measured ones in the median; 1 UNDECIDED, since nothing measured says by "
       "how much such figures are off.",
       "? UNDECIDED, though ahead: by less than such figures miss measured ones, or nothing measured says "
       "by how much they are off; the number is the margin over the second best in %"});
  for (ResultRow& row : m.rows) row.errors.clear();
  EXPECT_EQ(undecided(), std::vector<bool>(5, false));
  EXPECT_EQ(sweep_report(m.space, m.rows).find("measured"), std::string::npos);
}

// What is no finite number is none; zeros are a tie; and any number is ahead of 0, by no share of it.
TEST(Analysis, WhatIsNoNumberWinsNothing) {
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  Made m = made({{"rate", {"1", "2", "4", "8"}}, {"mode", {"pull", "push"}}}, {kGoodput},
                [](const std::vector<std::uint32_t>& at) {
                  const double goodput[4][2] = {{std::nan(""), 0.5}, {kInfinite, 0.5}, {0, 0}, {0.5, 0}};
                  return Values{goodput[at[0]][at[1]]};
                });
  for (const bool reversed : {false, true}) {
    if (reversed) std::ranges::reverse(m.rows);
    const std::vector<ContrastCell> cells = contrast_cells(m.space, 1, 0, m.rows);
    for (const std::size_t c : {0u, 1u}) {
      EXPECT_EQ(cells[c].best, 1u);
      EXPECT_EQ(cells[c].present, 1u);
      EXPECT_EQ(cells[c].missing, 1u);
      EXPECT_EQ(cells[c].margin, std::nullopt);
    }
    EXPECT_EQ(cells[2].margin, 0.0);
    EXPECT_EQ(cells[3].best, 0u);
    EXPECT_EQ(cells[3].margin, std::nullopt);
    EXPECT_EQ(comparable(m.space, m.rows)[reversed ? 7 : 0][0], std::nullopt);
  }
  m.space.contrasts = {{1, kGoodput}};
  const std::string report = sweep_report(m.space, m.rows);
  expect_tidy(report);
  expect_in(
      report,
      {"goodput (requests per second within the SLO): best 0.5 at point 1\nrate 1, mode push\nwhat mattered: "
       "rate 67 %, mode 0 %; interactions 33 %; with 6 values, chance alone explains up to 60 %",
       "rate    1    2  4  8\nU !  U !  =  P\nP pull, U push, = a tie, within 0.5 %; the number is the "
       "margin over the second best in %, ! = the only one that is compared",
       "push wins 2 of 4 cells, as the only one that is compared; pull 1; 1 a tie, within 0.5 %."});
}

// 10^(2a + b) is additive in its logarithm, and that is what is explained, as the table says it.
TEST(Analysis, SharesAreOfTheLogarithmOfWhatIsFarApart) {
  Made m =
      made({{"a", {"0", "1"}}, {"b", {"0", "1"}}, {"c", {"one"}}}, {kUsd},
           [](const std::vector<std::uint32_t>& at) { return Values{std::pow(10, 2.0 * at[0] + at[1])}; });
  std::ranges::reverse(m.rows);
  Shares shares = explained_shares(m.space, 0, m.rows);
  EXPECT_TRUE(shares.logarithm);
  ASSERT_EQ(shares.shares.size(), 3u);
  EXPECT_NEAR(*shares.shares[0], 0.8, 1e-12);
  EXPECT_NEAR(*shares.shares[1], 0.2, 1e-12);
  EXPECT_NEAR(*shares.shares[2], 0, 1e-12);
  expect_in(
      sweep_report(m.space, m.rows),
      {"what mattered: a 80 %, b 20 %; interactions 0 % (shares of the logarithm's variance); with 4 values, "
       "chance alone explains up to 33 %"});
  for (ResultRow& row : m.rows) row.objectives[0] = std::log10(*row.objectives[0]);  // 0 has no logarithm
  shares = explained_shares(m.space, 0, m.rows);
  EXPECT_FALSE(shares.logarithm);
  EXPECT_NEAR(*shares.shares[0], 0.8, 1e-12);
}

TEST(Analysis, TheReportOfTwoOtherParametersIsAMap) {
  Made m = made({{"workload.prompt_scale", {"0.5", "1", "2"}},
                 {"rate", {"1", "2"}},
                 {"deployment", {"colocated", "pull", "push"}}},
                {kUsd, kTtft}, [](const std::vector<std::uint32_t>& at) {
                  const double usd[] = {1.0 + at[0] * at[1], 1.5 + at[0], 1.4 + at[0]};
                  return Values{usd[at[2]], 100.0 * (3 - at[2]) * (1 + at[0])};
                });
  m.space.contrasts = {{2, kUsd}};
  const std::string report = sweep_report(m.space, m.rows);
  expect_tidy(report);
  expect_in(report,
            {"Pareto front of usd_per_request_in_slo, ttft_p95: 4 of 18 points",
             "usd_per_request_in_slo (dollars billed per request within the SLO): best 1 at point 0",
             "workload.prompt_scale 0.5, rate 1, deployment colocated",
             "ttft_p95 (time to first token, ms, 95th percentile): best 100 at point 2",
             // 1 against 1.4, 0.4 / 1.4 less; at prompts of 2 and rate 2: 3 against 3.4
             "deployment by usd_per_request_in_slo (dollars billed per request within the SLO), all else "
             "equal\nrate\n"
             "prompt_scale     1     2\n"
             "0.5           C 29  C 29\n"
             "1             C 58  C 17\n"
             "2             C 71  C 12\n"
             "C colocated, P pull, U push; the number is the margin over the second best in %\n"
             "colocated wins 6 of 6 cells, by 12 to 71 %; pull none; push none."});
  EXPECT_EQ(report.find("have run"), std::string::npos) << report;
}

TEST(Analysis, TheReportOfMoreParametersCounts) {
  Made m = made({{"model", {"small", "large"}},
                 {"prompt", {"512", "2048", "8192"}},
                 {"rate", {"1", "2", "4"}},
                 {"network", {"0.5", "1", "2"}},
                 {"deployment", {"colocated", "split"}}},
                {kUsd}, [](const std::vector<std::uint32_t>& at) {
                  // Split pays from long prompts at a high rate; the rest hardly matters.
                  const double gain = static_cast<double>(at[1]) + at[2] - 2.2 + 0.1 * at[3];
                  return Values{at[4] == 0 ? 10.0 : 10 - gain};
                });
  m.space.contrasts = {{4, kUsd}};
  m.rows[0].finished = false;
  m.rows[5].objectives[0].reset();
  m.rows.pop_back();
  const std::string report = sweep_report(m.space, m.rows);
  expect_tidy(report);
  expect_in(report,
            {"Of 108 points 107 have run; what follows is of these.", "1 point failed and has no value.",
             // By prompt + rate, counted from 0: below 2 colocated wins, above it split; at 2 a gain of
             // -0.2, -0.1 and, which is a tie, 0 by network. Three cells lack a point.
             "rate\n"
             "prompt      1      2      4\n"
             "512     C5 S1     C6  C4 =2\n"
             "2048       C6  C4 =2     S6\n"
             "8192    C4 =2     S6  S5 *1\n"
             "C colocated, S split, = a tie, within 0.5 %, * not run; how many cells each wins\n"
             "network  0.5    colocated 11, split 7\n"
             "1      colocated 12, split 6\n"
             "2      colocated 6, split 5, tie 6, not run 1\n"
             "model    small  colocated 14, split 10, tie 3\n"
             "large  colocated 15, split 8, tie 3, not run 1\n"
             "colocated wins 29 of 54 cells, by 1.0 to 18 %, in 1 as the only one that is compared; split "
             "18, by 8.0 to 20 %, in 1 as the only one that is compared; 6 a tie, within 0.5 %; 1 not run "
             "to the end."});
  EXPECT_EQ(report.find("Pareto"), std::string::npos) << "of one objective";
}

// Rows in any order are the same report; of none there is little to say, and nothing breaks.
TEST(Analysis, TheReportDependsOnThePointsAlone) {
  Made m = made({{"a", {"1", "2", "3", "4"}}, {"b", {"x", "y"}}}, {kUsd, kTtft},
                [](const std::vector<std::uint32_t>& at) {
                  return Values{1.0 + at[0], 5.0 - at[0] + at[1]};
                });
  m.space.contrasts = {{1, kTtft}};
  const std::string report = sweep_report(m.space, m.rows);
  std::ranges::reverse(m.rows);
  EXPECT_EQ(report, sweep_report(m.space, m.rows));
  expect_tidy(report);
  for (ResultRow& row : m.rows) row.finished = false;
  const std::string failed = sweep_report(m.space, m.rows);
  expect_tidy(failed);
  expect_in(failed, {"8 points failed and have no value.", "0 of 8 points\nno point has a value of each",
                     "ttft_p95 (time to first token, ms, 95th percentile): no point has a value",
                     "a  1  2  3  4\n-  -  -  -\nX x, Y y, - no value;",
                     "none wins any of 4 cells; 4 where none has a value."});
  const std::string none = sweep_report(m.space, {});
  expect_in(none, {"Of 8 points 0 have run; what follows is of these."});
}

// Long names, many parameters, many levels: still 100 columns.
TEST(Analysis, TheReportStaysWithinItsWidth) {
  std::vector<std::string> many, words;
  for (int i = 1; i <= 40; ++i) many.push_back(std::to_string(i * 1000));
  for (int i = 0; i < 30; ++i) words.push_back("a-rather-long-word-" + std::to_string(i));
  Made m = made({{"pools.prefill.engine.max_num_batched_tokens", many},
                 {"pools.decode.engine.max_num_batched_tokens", {"1", "2"}},
                 {"transfer.kv_connector.a_word", words},
                 {"deployment", {"disaggregated-with-a-long-name", "colocated-with-a-long-name"}}},
                {kUsd, kTtft, kGoodput}, [](const std::vector<std::uint32_t>& at) {
                  return Values{1.0 + at[0] + at[1], 5e3 - 13.0 * at[0] - at[2], 1.0 + at[3] + at[2] % 3};
                });
  m.space.contrasts = {{3, kUsd}, {3, kGoodput}, {2, kTtft}};
  const std::string report = sweep_report(m.space, m.rows);
  expect_tidy(report);
  // Goodput is 1, 2 or 3 by word, and 1 more colocated.
  expect_in(
      report,
      {"goodput: 40 of 4800 points", "and 28 more between them",
       "decode.engine.max_num_batched_tokens\n"
       "prefill.engine.max_num_batched_tokens     1     2\n"
       "1000..5000                             C150  C150",
       "colocated-with-a-long-name wins 2400 of 2400 cells, by 33 to 100 %; disaggregated-with-a-long-name "
       "none."});
}

}  // namespace
}  // namespace pdsim
