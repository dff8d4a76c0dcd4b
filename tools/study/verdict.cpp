#include "tools/study/verdict.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/math/distributions/students_t.hpp>
#include <cmath>
#include <numeric>
#include <string_view>
#include <tuple>

#include "tools/study/text.hpp"

namespace pdsim {

namespace {

// How a sentence says that one is better than another: "A is 12.3 % <phrase> than B".
struct Phrase {
  std::string_view objective, better;
};
constexpr Phrase kPhrases[] = {
    {"usd_per_request_in_slo", "cheaper per request within the SLO"},
    {"usd_per_million_output_tokens", "cheaper per million output tokens"},
    {"goodput", "higher in goodput (requests per second within the SLO)"},
    {"slo_fraction", "higher in the share of requests within the SLO"},
    {"output_tokens_per_s_per_gpu", "higher in output tokens per second and GPU"},
    {"ttft_mean", "faster to the first token in the mean"},
    {"ttft_p95", "faster to the first token at p95"},
    {"ttft_p99", "faster to the first token at p99"},
    {"tpot_mean", "faster per output token in the mean"},
    {"tpot_p95", "faster per output token at p95"},
    {"tpot_p99", "faster per output token at p99"},
    {"e2e_mean", "faster from arrival to the last token in the mean"},
    {"e2e_p95", "faster from arrival to the last token at p95"},
};

std::string better_in(const Objective& objective) {
  const auto* found = std::ranges::find(kPhrases, std::string_view(objective.name), &Phrase::objective);
  if (found != std::end(kPhrases)) return std::string(found->better);
  return fmt::format("{} in {}", objective.less_is_better ? "lower" : "higher", objective.name);
}

std::string_view sentence_of(const Objective& objective) {
  const auto* found = std::ranges::find(kObjectives, std::string_view(objective.name), &NamedObjective::name);
  return found != std::end(kObjectives) ? found->sentence : std::string_view(objective.name);
}

std::string listed(const std::vector<std::string>& names) {
  if (names.size() < 2) return names.empty() ? "" : names.front();
  return fmt::format("{} and {}", fmt::join(names.begin(), names.end() - 1, ", "), names.back());
}

// Against a value of 0 nothing is relative: whatever differs from it differs by all of it.
double relative(double value, double to) {
  if (value == to) return 0;
  return to != 0 ? (value - to) / std::abs(to) : (value > to ? 1.0 : -1.0);
}

// How the replications of the two count: with one of them drawn from a trace, as drawn from it.
Replicated replicated(const Contender& a, const Contender& b) {
  return std::max(a.replicated, b.replicated);
}

// The interval of the difference of a to b, relative to b, over the replications that both have.
std::optional<Interval> paired(const Contender& a, const Contender& b) {
  std::vector<double> differences;
  for (std::size_t r = 0; r < std::min(a.replications.size(), b.replications.size()); ++r) {
    differences.push_back(relative(a.replications[r], b.replications[r]));
  }
  return interval_of(differences, replicated(a, b));
}

// More than this many are not worth asking for: the difference is lost in chance.
constexpr int kMostReplications = 1000;  // chosen: an overnight study

// So many replications, of the spread seen, as would bring the interval off 0; 0 = more than kMost.
int replications_needed(const Interval& seen) {
  const auto t = [](int n) { return boost::math::quantile(boost::math::students_t(n - 1), 0.975); };
  const double deviation = (seen.high - seen.low) / 2 / t(seen.n) * std::sqrt(seen.n);
  for (int n = seen.n + 1; n <= kMostReplications; ++n) {
    if (t(n) * deviation / std::sqrt(n) < std::abs(seen.mean)) return n;
  }
  return 0;
}

// What would bring an interval of sessions drawn anew off 0: it narrows as 1 / sqrt(length).
std::string longer_trace(const Interval& seen) {
  constexpr double kLongest = 1000;  // chosen: nobody records that much more
  const double ratio = (seen.high - seen.low) / 2 / std::abs(seen.mean);
  const double lengths = std::floor(ratio * ratio) + 1;
  if (!(lengths <= kLongest)) {
    return fmt::format("a longer trace: of what was seen, one {:.0f} times as long would not suffice",
                       kLongest);
  }
  return fmt::format(
      "a trace about {:.0f} times as long, since replications drawn from this one narrow nothing", lengths);
}

// "over 5 replications"; of sessions drawn anew, that they are.
std::string over_replications(const Interval& seen, Replicated how) {
  std::string text = fmt::format("over {} replications", seen.n);
  if (how == Replicated::sessions) text += fmt::format(" of {}", kReplicatedNames[1]);
  return text;
}

// Whether the figures are of those requests alone that completed.
bool of_the_completed(std::string_view path) {
  return path.starts_with("latency_ms.") || path.starts_with("stages_ms.") ||
         path.starts_with("goodput.slo.");
}

// The best against one of the others.
struct Duel {
  std::size_t other = 0;
  double margin = 0;                   // relative to the other's value
  double error = 0;                    // of the weaker evidence
  const Evidence* evidence = nullptr;  // the weaker
  Grade grade = Grade::datasheet;      // the weaker of the two
  bool measured = false;               // the error says something
  std::optional<Interval> difference;
  Replicated how = Replicated::seeds;
  bool tie = false, beyond_error = false, beyond_chance = false;

  bool decided() const { return !tie && beyond_error && beyond_chance; }
};

Duel duel(const Objective& objective, const Contender& best, const Contender& other, std::size_t index) {
  // Without any measurement it is the weakest; then by grade, then by how far figures are off.
  const auto weakness = [&](const Contender& c) {
    const GradeError& error = error_for(c.evidence, objective.path);
    return std::tuple(!error.known(), c.evidence.grade, error.median);
  };
  const Contender& weaker = weakness(best) > weakness(other) ? best : other;
  Duel d;
  d.other = index;
  d.margin = std::abs(relative(*best.value, *other.value));
  d.evidence = &weaker.evidence;
  d.grade = std::max(best.evidence.grade, other.evidence.grade);
  d.error = error_for(weaker.evidence, objective.path).median;
  d.measured = error_for(weaker.evidence, objective.path).known();
  d.difference = paired(best, other);
  d.how = replicated(best, other);
  d.tie = d.margin < kTie;
  d.beyond_error = d.measured && d.margin > d.error;
  d.beyond_chance =
      !d.difference || (objective.less_is_better ? d.difference->high < 0 : d.difference->low > 0);
  return d;
}

std::string evidence_sentence(const Duel& d) {
  const std::string_view grade = kGradeNames[static_cast<std::size_t>(d.grade)];
  if (!d.measured) return fmt::format("evidence: {}, whose errors no measurement bounds", grade);
  return fmt::format("evidence: {}, whose figures miss by {} in the median", grade, percent(d.error));
}

// "X is 12.3 % cheaper per request within the SLO than Y".
std::string ahead(const Objective& objective, const Contender& best, const Contender& other, double margin) {
  if (*other.value == 0 && *best.value != 0) {
    return fmt::format("{} is {} than {}, which has 0", best.name, better_in(objective), other.name);
  }
  return fmt::format("{} is {} {} than {}", best.name, percent(margin), better_in(objective), other.name);
}

std::string what_decides(const Duel& d) {
  std::vector<std::string> ways;
  if (!d.beyond_error) {
    ways.push_back(!d.evidence->to_do.empty()
                       ? d.evidence->to_do
                       : "measure the same model on the same GPUs, and run pdsim validate");
  }
  if (!d.beyond_chance && d.how == Replicated::sessions) {
    ways.push_back(longer_trace(*d.difference));
  } else if (!d.beyond_chance) {
    const int n = replications_needed(*d.difference);
    ways.push_back(n > 0 ? fmt::format("about {} replications (--replications {})", n, n)
                         : fmt::format("a longer trace: of what was seen, {} replications would not suffice",
                                       kMostReplications));
  }
  return fmt::format("{}", fmt::join(ways, "; and "));
}

void say_undecided(Verdict& verdict, const Objective& objective, std::span<const Contender> contenders,
                   std::size_t best, const Duel& d, bool alike) {
  std::vector<std::string> doubts;
  const std::string_view grade = kGradeNames[static_cast<std::size_t>(d.grade)];
  if (!d.measured) {
    doubts.push_back(fmt::format("no measurement says how far such figures are off (evidence: {})", grade));
  } else if (!d.beyond_error) {
    doubts.push_back(fmt::format("such figures miss measured ones by {} in the median (evidence: {})",
                                 percent(d.error), grade));
  }
  if (!d.beyond_chance) {
    doubts.push_back(fmt::format("{} the difference lies between {:+.1f} % and {:+.1f} %",
                                 over_replications(*d.difference, d.how), d.difference->low * 100,
                                 d.difference->high * 100));
  }
  const std::string& choice = contenders[*verdict.recommended].name;
  verdict.text = fmt::format(
      "UNDECIDED: {}, but {}. {}", ahead(objective, contenders[best], contenders[d.other], d.margin),
      fmt::join(doubts, ", and "),
      alike ? fmt::format("None of those that may be best is simpler; {} has the better figure.", choice)
            : fmt::format("Until it is decided, {} is the simpler choice.", choice));
  verdict.to_decide = what_decides(d);
}

}  // namespace

Verdict judge(const Objective& objective, std::span<const Contender> contenders) {
  Verdict verdict;
  std::vector<std::size_t> ranked;  // best first; of equal values the simpler
  std::vector<std::string> without, fewer;
  double most = 0;
  const auto has_figure = [](const Contender& c) {
    return c.value && std::isfinite(*c.value) &&
           std::ranges::all_of(c.replications, [](double v) { return std::isfinite(v); });
  };
  for (const Contender& c : contenders) {
    if (has_figure(c)) most = std::max(most, c.completed);
  }
  for (std::size_t i = 0; i < contenders.size(); ++i) {
    const Contender& c = contenders[i];
    if (!has_figure(c)) {
      without.push_back(c.name);
    } else if (of_the_completed(objective.path) && c.completed < most - kCompletedFewer) {
      fewer.push_back(fmt::format("{} completed {:.1f} % of the requests", c.name, c.completed * 100));
    } else {
      ranked.push_back(i);
    }
  }
  const auto key = [&](std::size_t i) {
    const Contender& c = contenders[i];
    return std::tuple(objective.less_is_better ? *c.value : -*c.value, c.complexity, std::string_view(c.name),
                      i);
  };
  std::ranges::sort(ranked, {}, key);
  std::ranges::sort(without);
  std::ranges::sort(fewer);
  std::string cannot;
  if (!without.empty()) {
    cannot += fmt::format(" {} {} no such figure and cannot win.", listed(without),
                          without.size() == 1 ? "has" : "have");
  }
  if (!fewer.empty()) {
    cannot += fmt::format(" {}, against {:.1f} %: latencies of fewer requests are no win.", listed(fewer),
                          most * 100);
  }
  if (ranked.empty()) {
    verdict.text =
        fmt::format("Nobody wins: none has a figure for {} ({}).", objective.name, sentence_of(objective));
    return verdict;
  }

  const std::size_t best = ranked.front();
  std::vector<Duel> duels;
  for (std::size_t k = 1; k < ranked.size(); ++k) {
    duels.push_back(duel(objective, contenders[best], contenders[ranked[k]], ranked[k]));
  }
  if (duels.empty()) {
    verdict.decision = Decision::decided;
    verdict.winner = verdict.recommended = best;
    verdict.evidence = contenders[best].evidence.grade;
    verdict.error = error_for(contenders[best].evidence, objective.path).median;
    verdict.text = fmt::format("{} is the only one {} {} ({}).{}", contenders[best].name,
                               fewer.empty() ? "with a figure for" : "that can win by", objective.name,
                               sentence_of(objective), cannot);
    return verdict;
  }

  const auto open = std::ranges::find_if(duels, [](const Duel& d) { return !d.tie && !d.decided(); });
  std::vector<std::size_t> may_be_best = {best};
  std::vector<std::string> tied = {contenders[best].name};
  for (const Duel& d : duels) {
    if (d.tie || (!d.decided() && open != duels.end())) may_be_best.push_back(d.other);
    if (d.tie) tied.push_back(contenders[d.other].name);
  }
  const auto simpler = [&](std::size_t a, std::size_t b) {
    return contenders[a].complexity < contenders[b].complexity;
  };
  const std::size_t simplest = *std::ranges::min_element(may_be_best, simpler);  // the better of equals

  const auto alike = static_cast<std::size_t>(std::ranges::count_if(may_be_best, [&](std::size_t i) {
    return contenders[i].complexity == contenders[simplest].complexity;
  }));

  const Duel* against = open != duels.end() ? &*open : &duels.front();
  verdict.recommended = simplest;
  if (open != duels.end()) {
    verdict.decision = Decision::undecided;
    say_undecided(verdict, objective, contenders, best, *against, alike == may_be_best.size());
  } else if (!duels.front().tie) {
    verdict.decision = Decision::decided;
    verdict.winner = best;
    verdict.text = fmt::format(
        "{}; {}.", ahead(objective, contenders[best], contenders[against->other], against->margin),
        evidence_sentence(*against));
    if (against->difference) {
      verdict.text.insert(
          verdict.text.find("; evidence"),
          fmt::format(" ({:.1f} % to {:.1f} % {})",
                      std::min(std::abs(against->difference->low), std::abs(against->difference->high)) * 100,
                      std::max(std::abs(against->difference->low), std::abs(against->difference->high)) * 100,
                      over_replications(*against->difference, against->how)));
    }
  } else {
    verdict.decision = Decision::tie;
    const double widest =
        std::ranges::max(duels, {}, [](const Duel& d) { return d.tie ? d.margin : 0; }).margin;
    const std::string what = widest == 0
                                 ? fmt::format("{} are the same in {}", listed(tied), sentence_of(objective))
                                 : fmt::format("{} are within {:.2g} % of each other in {}", listed(tied),
                                               widest * 100, sentence_of(objective));
    const auto weaker = [](const Duel& a, const Duel& b) {
      return std::tuple(a.tie, a.grade, !a.measured, a.error) <
             std::tuple(b.tie, b.grade, !b.measured, b.error);
    };
    const std::string evidence = evidence_sentence(*std::ranges::max_element(duels, weaker));
    if (alike == 1) {
      verdict.winner = simplest;
      verdict.text = fmt::format("A tie: {}; it goes to the simplest, {}; {}.", what,
                                 contenders[simplest].name, evidence);
    } else {
      verdict.recommended.reset();
      verdict.text = fmt::format("A tie: {}, and none is simpler than the others; {}.", what, evidence);
    }
    if (simplest != best && verdict.winner) {
      against = &*std::ranges::find(duels, simplest, &Duel::other);
      verdict.second = best;
    }
  }
  if (!verdict.second) verdict.second = against->other;
  verdict.margin = against->margin;
  verdict.error = against->error;
  verdict.difference = against->difference;
  verdict.evidence = against->grade;
  verdict.text += cannot;
  return verdict;
}

}  // namespace pdsim
