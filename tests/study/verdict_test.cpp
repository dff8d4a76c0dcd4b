// Theory: a winner is named when the margin over every other exceeds both what figures of that evidence are
// off by and what replications leave open; what is the same goes to the simpler; everything else is
// undecided, and says what would decide it. None of it depends on the order of the contenders, and more
// error never makes anything decided.
#include "tools/study/verdict.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace pdsim {
namespace {

const Objective kDollars = find_objective("usd_per_request_in_slo", "x");
const Objective kGoodput = find_objective("goodput", "x");

Evidence evidence(Grade grade, double median, int n = 50) {
  Evidence e;
  e.grade = grade;
  e.to_do = "measure it";
  e.ttft = e.tpot = e.throughput = {median, 2 * median, 0, n, 0};
  return e;
}

Contender contender(std::string name, std::optional<double> value, int complexity,
                    Evidence e = evidence(Grade::same_gpu, 0.05)) {
  Contender c;
  c.name = std::move(name);
  c.value = value;
  c.evidence = std::move(e);
  c.complexity = complexity;
  return c;
}

bool says(const std::string& text, std::string_view what) {
  return text.find(what) != std::string::npos;
}

std::string name_of(const std::vector<Contender>& all, std::optional<std::size_t> i) {
  return i ? all[*i].name : "";
}

// What the verdict says, by names: the same for every order of the contenders.
struct Named {
  Decision decision;
  std::string winner, recommended, second, text;
  double margin;
  bool operator==(const Named&) const = default;
};

Named judged(const Objective& objective, std::vector<Contender> all) {
  const auto less = [](const Contender& a, const Contender& b) { return a.name < b.name; };
  std::ranges::sort(all, less);
  const auto once = [&] {
    const Verdict v = judge(objective, all);
    return Named{
        v.decision, name_of(all, v.winner), name_of(all, v.recommended), name_of(all, v.second), v.text,
        v.margin};
  };
  const Named first = once();
  while (std::ranges::next_permutation(all, less).found) {
    const Named again = once();
    EXPECT_EQ(again, first) << again.text << "\n" << first.text;
  }
  return first;
}

TEST(Verdict, AMarginBeyondTheErrorDecides) {
  const Named v = judged(kDollars, {contender("colocated", 0.88, 0), contender("pull", 1.0, 1)});
  EXPECT_EQ(v.decision, Decision::decided);
  EXPECT_EQ(v.winner, "colocated");
  EXPECT_EQ(v.recommended, "colocated");
  EXPECT_EQ(v.second, "pull");
  EXPECT_NEAR(v.margin, 0.12, 1e-12);
  EXPECT_EQ(v.text,
            "colocated is 12 % cheaper per request within the SLO than pull; evidence: same GPU, other "
            "model, whose figures miss by 5.0 % in the median.");
}

TEST(Verdict, TheObjectiveSaysWhichWayIsBetter) {
  const Named v = judged(kGoodput, {contender("colocated", 2.0, 0), contender("pull", 3.0, 1)});
  EXPECT_EQ(v.decision, Decision::decided);
  EXPECT_EQ(v.winner, "pull");
  EXPECT_NEAR(v.margin, 0.5, 1e-12);
  EXPECT_TRUE(says(v.text, "pull is 50 % higher in goodput")) << v.text;
}

TEST(Verdict, AMarginInsideTheErrorIsUndecidedAndTheSimplerIsRecommended) {
  const std::vector<Contender> all = {contender("pull", 0.96, 1), contender("colocated", 1.0, 0)};
  const Named v = judged(kDollars, all);
  EXPECT_EQ(v.decision, Decision::undecided);
  EXPECT_EQ(v.winner, "");
  EXPECT_EQ(v.recommended, "colocated");
  EXPECT_EQ(v.second, "colocated");
  EXPECT_TRUE(v.text.starts_with("UNDECIDED: pull is 4.0 % cheaper")) << v.text;
  EXPECT_TRUE(says(v.text, "colocated is the simpler choice")) << v.text;
  EXPECT_EQ(judge(kDollars, all).to_decide, "measure it");
  EXPECT_DOUBLE_EQ(judge(kDollars, all).error, 0.05);
}

// The error is that of the figure: an objective of latencies takes theirs.
TEST(Verdict, TheErrorIsTheObjectivesOwn) {
  std::vector<Contender> all = {contender("pull", 0.9, 1), contender("colocated", 1.0, 0)};
  for (Contender& c : all) c.evidence.tpot.median = 0.2;
  EXPECT_EQ(judged(kDollars, all).decision, Decision::decided);
  EXPECT_EQ(judged(find_objective("ttft_p95", "x"), all).decision, Decision::decided);
  EXPECT_EQ(judged(find_objective("tpot_p95", "x"), all).decision, Decision::undecided);
}

TEST(Verdict, TheWeakerEvidenceOfTheTwoCounts) {
  const auto of = [](Evidence a, Evidence b) {
    return judge(kDollars, std::vector<Contender>{contender("pull", 0.9, 1, std::move(a)),
                                                  contender("colocated", 1.0, 0, std::move(b))});
  };
  const Evidence strong = evidence(Grade::measured_here, 0.05);
  const Evidence weak = evidence(Grade::extrapolated, 0.2);
  EXPECT_EQ(of(strong, strong).decision, Decision::decided);
  for (const Verdict& v : {of(strong, weak), of(weak, strong)}) {
    EXPECT_EQ(v.decision, Decision::undecided);
    EXPECT_EQ(v.evidence, Grade::extrapolated);
    EXPECT_DOUBLE_EQ(v.error, 0.2);
  }
}

// 30 % apart, and nobody has ever measured anything of the kind.
TEST(Verdict, WithoutAnyMeasurementNothingIsDecided) {
  const Evidence none = evidence(Grade::datasheet, 0, 0);
  const Named v = judged(kDollars, {contender("pull", 0.7, 1, none), contender("colocated", 1.0, 0, none)});
  EXPECT_EQ(v.decision, Decision::undecided);
  EXPECT_EQ(v.recommended, "colocated");
  EXPECT_TRUE(says(v.text, "no measurement says how far such figures are off (evidence: datasheet)"))
      << v.text;
  EXPECT_EQ(
      judged(kDollars, {contender("pull", 1.0, 1, none), contender("colocated", 1.0, 0, none)}).decision,
      Decision::tie);
}

TEST(Verdict, TiesGoToTheSimpler) {
  const Named v = judged(kDollars, {contender("push", 0.998, 2), contender("pull", 1.0, 1)});
  EXPECT_EQ(v.decision, Decision::tie);
  EXPECT_EQ(v.winner, "pull");
  EXPECT_EQ(v.recommended, "pull");
  EXPECT_EQ(v.second, "push");
  EXPECT_NEAR(v.margin, 0.002, 1e-12);
  EXPECT_TRUE(says(v.text, "A tie: push and pull are within 0.2 % of each other")) << v.text;
  // kTie itself is a difference.
  EXPECT_EQ(judged(kDollars, {contender("push", 0.99, 2), contender("pull", 1.0, 1)}).decision,
            Decision::undecided);
}

TEST(Verdict, TheSameTwiceIsATieThatNobodyWins) {
  const Named v = judged(kDollars, {contender("one", 1.0, 1), contender("two", 1.0, 1)});
  EXPECT_EQ(v.decision, Decision::tie);
  EXPECT_EQ(v.winner, "");
  EXPECT_EQ(v.margin, 0);
  EXPECT_TRUE(says(v.text, "one and two are the same")) << v.text;
  EXPECT_EQ(judged(kDollars, {contender("one", 0.0, 1), contender("two", 0.0, 0)}).winner, "two");
}

// pull and push are as good as each other; colocated is worse, but not by more than the error.
TEST(Verdict, ATieIsNoWinWhileAThirdMayBeBetter) {
  const Named v = judged(
      kDollars, {contender("pull", 1.0, 1), contender("push", 0.999, 2), contender("colocated", 1.03, 0)});
  EXPECT_EQ(v.decision, Decision::undecided);
  EXPECT_EQ(v.recommended, "colocated");
  EXPECT_EQ(v.second, "colocated");
  const Named far = judged(
      kDollars, {contender("pull", 1.0, 1), contender("push", 0.999, 2), contender("colocated", 1.3, 0)});
  EXPECT_EQ(far.decision, Decision::tie);
  EXPECT_EQ(far.winner, "pull");
}

// The runner-up is beaten, a third of weaker evidence is not.
TEST(Verdict, EveryOtherHasToBeBeaten) {
  const Named v = judged(kDollars, {contender("a", 1.0, 1, evidence(Grade::measured_here, 0.03)),
                                    contender("b", 1.1, 1, evidence(Grade::measured_here, 0.03)),
                                    contender("c", 1.15, 0, evidence(Grade::extrapolated, 0.25))});
  EXPECT_EQ(v.decision, Decision::undecided);
  EXPECT_EQ(v.second, "c");
  EXPECT_EQ(v.recommended, "c");  // simpler than a; b is beaten
}

TEST(Verdict, WhoHasNoFigureCannotWinAndIsNamed) {
  const Named v = judged(kDollars, {contender("pull", 1.0, 1), contender("colocated", std::nullopt, 0),
                                    contender("push", 2.0, 2)});
  EXPECT_EQ(v.winner, "pull");
  EXPECT_TRUE(says(v.text, "colocated has no such figure and cannot win")) << v.text;
  const Named alone = judged(kDollars, {contender("pull", 1.0, 1), contender("colocated", std::nullopt, 0)});
  EXPECT_EQ(alone.decision, Decision::decided);
  EXPECT_EQ(alone.winner, "pull");
  EXPECT_EQ(alone.second, "");
  const Named nobody =
      judged(kDollars, {contender("pull", std::nullopt, 1), contender("push", std::nan(""), 1)});
  EXPECT_EQ(nobody.decision, Decision::nobody);
  EXPECT_EQ(nobody.winner, "");
  EXPECT_EQ(judge(kDollars, {}).decision, Decision::nobody);
}

TEST(Verdict, AgainstNothingEverythingIsBetter) {
  const Named v = judged(kGoodput, {contender("pull", 1.0, 1), contender("colocated", 0.0, 0)});
  EXPECT_EQ(v.decision, Decision::decided);
  EXPECT_EQ(v.winner, "pull");
  EXPECT_DOUBLE_EQ(v.margin, 1);
}

// 10, 14 and 12 % better in three replications: t(0.975, 2) = 4.303, s = 2, half-width 4.97, so 7.0 to 17.0.
TEST(Verdict, ReplicationsArePaired) {
  Contender pull = contender("pull", 0.88, 1), colocated = contender("colocated", 1.0, 0);
  colocated.replications = {1.0, 2.0, 0.5};
  pull.replications = {0.9, 1.72, 0.44};
  const Verdict v = judge(kDollars, std::vector<Contender>{pull, colocated});
  ASSERT_TRUE(v.difference);
  EXPECT_NEAR(v.difference->mean, -0.12, 1e-9);
  EXPECT_NEAR(v.difference->low, -0.1697, 1e-4);
  EXPECT_NEAR(v.difference->high, -0.0703, 1e-4);
  EXPECT_EQ(v.decision, Decision::decided);
  EXPECT_TRUE(says(v.text, "(7.0 % to 17.0 % over 3 replications)")) << v.text;
}

// 30, -10 and 16 % better: mean 12, s = 20.3, half-width 50: chance alone may have done it.
TEST(Verdict, AnIntervalAcrossZeroAsksForMoreReplications) {
  Contender pull = contender("pull", 0.88, 1), colocated = contender("colocated", 1.0, 0);
  colocated.replications = {1, 1, 1};
  pull.replications = {0.7, 1.1, 0.84};
  Verdict v = judge(kDollars, std::vector<Contender>{pull, colocated});
  EXPECT_EQ(v.decision, Decision::undecided);
  EXPECT_EQ(v.recommended, 1u);
  EXPECT_TRUE(says(v.text, "over 3 replications the difference lies between -62.4 % and +38.4 %")) << v.text;
  // t(0.975, n - 1) x 20.298 / sqrt(n) falls below 12 at n = 14 (11.72; 12.27 at 13).
  EXPECT_EQ(v.to_decide, "about 14 replications (--replications 14)");
  // Not worth it where the mean is as good as none.
  pull.replications = {0.7, 1.3, 1.0001};
  v = judge(kDollars, std::vector<Contender>{pull, colocated});
  EXPECT_TRUE(says(v.to_decide, "1000 replications would not suffice")) << v.to_decide;
  // Both doubts are named.
  pull.value = 0.97;
  v = judge(kDollars, std::vector<Contender>{pull, colocated});
  EXPECT_TRUE(says(v.to_decide, "measure it; and ")) << v.to_decide;
}

// The same differences of sessions drawn anew: s = 2 and t = 4.303 leave 12 -+ 8.6 %, and of s = 20.3
// 12 -+ 87 %, which only a trace (87 / 12)^2 = 53 times as long would bring off 0.
TEST(Verdict, SessionsDrawnAnewLeaveTheSpreadItself) {
  Contender pull = contender("pull", 0.88, 1), colocated = contender("colocated", 1.0, 0);
  colocated.replications = {1, 1, 1};
  pull.replications = {0.9, 0.86, 0.88};
  pull.replicated = Replicated::sessions;
  Verdict v = judge(kDollars, std::vector<Contender>{pull, colocated});
  EXPECT_EQ(v.decision, Decision::decided);
  EXPECT_NEAR(v.difference->high, -0.12 + 4.3027 * 0.02, 1e-4);
  EXPECT_TRUE(says(v.text, "over 3 replications of sessions drawn anew)")) << v.text;
  pull.replications = {0.7, 1.1, 0.84};
  v = judge(kDollars, std::vector<Contender>{pull, colocated});
  EXPECT_EQ(v.decision, Decision::undecided);
  EXPECT_TRUE(v.to_decide.starts_with("a trace about 53 times as long")) << v.to_decide;
  EXPECT_FALSE(says(v.to_decide, "--replications")) << v.to_decide;
  // As many again of the same tell nothing new: only t is smaller.
  for (Contender* c : {&pull, &colocated}) {
    const std::vector<double> once = c->replications;
    for (int n = 0; n < 30; ++n) c->replications.insert(c->replications.end(), once.begin(), once.end());
  }
  EXPECT_EQ(judge(kDollars, std::vector<Contender>{pull, colocated}).decision, Decision::undecided);
  pull.replicated = Replicated::seeds;
  EXPECT_EQ(judge(kDollars, std::vector<Contender>{pull, colocated}).decision, Decision::decided);
}

// Latencies are of the requests that completed: to give up on the slow ones is no win.
TEST(Verdict, CompletingFewerIsNoWinOnLatencies) {
  const auto objective = find_objective("ttft_p95", "x");
  Contender pull = contender("pull", 0.5, 1), colocated = contender("colocated", 1.0, 0),
            push = contender("push", 2.0, 2);
  pull.completed = 0.8;
  const Named v = judged(objective, {pull, colocated, push});
  EXPECT_EQ(v.decision, Decision::decided);
  EXPECT_EQ(v.winner, "colocated");
  EXPECT_EQ(v.second, "push");
  EXPECT_TRUE(says(v.text,
                   "pull completed 80.0 % of the requests, against 100.0 %: latencies of fewer "
                   "requests are no win."))
      << v.text;
  EXPECT_TRUE(says(judged(objective, {pull, colocated}).text, "colocated is the only one that can win by"));
  EXPECT_EQ(judged(find_objective("min:stages_ms.prefill.p99", "x"), {pull, colocated}).winner, "colocated");
  // By what counts the requests themselves it may win; and a thousandth is nothing.
  EXPECT_EQ(judged(kDollars, {pull, colocated}).winner, "pull");
  pull.completed = 0.9995;
  EXPECT_EQ(judged(objective, {pull, colocated}).winner, "pull");
  // One without a figure does not set the measure.
  pull.completed = 0.8;
  colocated.value.reset();
  EXPECT_EQ(judged(objective, {pull, colocated}).winner, "pull");
}

TEST(Verdict, ATieNamesTheWeakestEvidence) {
  const Evidence weak = evidence(Grade::extrapolated, 0.2);
  const Named v = judged(kDollars, {contender("pull", 1.0, 1), contender("push", 0.999, 2, weak)});
  EXPECT_TRUE(says(v.text, "goes to the simplest, pull; evidence: extrapolated, whose figures miss by 20 %"))
      << v.text;
  const Named none = judged(kDollars, {contender("a", 1.0, 1), contender("b", 1.0, 1)});
  EXPECT_TRUE(says(none.text, "; evidence: same GPU, other model, whose figures miss by 5.0 %")) << none.text;
}

// What scaling costs is known of kernels where no run was measured.
TEST(Verdict, AStatedErrorIsOne) {
  Evidence stated = evidence(Grade::datasheet, 0.27, 0);
  stated.throughput.rows = 1000;
  const auto of = [&](double value) {
    return judged(kDollars, {contender("pull", value, 1, stated), contender("colocated", 1.0, 0, stated)});
  };
  EXPECT_EQ(of(0.5).decision, Decision::decided);
  EXPECT_EQ(of(0.9).decision, Decision::undecided);
}

// A difference that chance cannot explain, but on the wrong side of the means.
TEST(Verdict, AnIntervalOnTheOtherSideDecidesNothing) {
  Contender pull = contender("pull", 0.8, 1), colocated = contender("colocated", 1.0, 0);
  colocated.replications = {1, 1, 1};
  pull.replications = {1.2, 1.21, 1.22};
  EXPECT_EQ(judge(kDollars, std::vector<Contender>{pull, colocated}).decision, Decision::undecided);
  pull.value = 1.2, colocated.value = 1.0;
  const Verdict v = judge(kGoodput, std::vector<Contender>{pull, colocated});
  EXPECT_EQ(v.decision, Decision::decided);
}

// The mean over the others would be that of the worlds in which it works.
TEST(Verdict, WhoHasNoFigureInAReplicationHasNone) {
  Contender pull = contender("pull", 0.88, 1), colocated = contender("colocated", 1.0, 0);
  colocated.replications = {1.0, 1.0, 2.0, 0.5};
  pull.replications = {0.9, std::nan(""), 1.72, 0.44};
  const Verdict v = judge(kDollars, std::vector<Contender>{pull, colocated});
  EXPECT_EQ(v.winner, 1u);
  EXPECT_TRUE(says(v.text, "pull has no such figure and cannot win")) << v.text;
  EXPECT_FALSE(v.difference);
  pull.replications = {0.9};
  EXPECT_FALSE(judge(kDollars, std::vector<Contender>{pull, colocated}).difference);
}

// The larger the error, the fewer verdicts; the error at which one falls is the margin.
TEST(Verdict, MoreErrorNeverDecides) {
  bool decided = true;
  int changes = 0;
  for (int e = 0; e <= 40; ++e) {
    const Evidence of = evidence(Grade::same_gpu, e / 100.0);
    const Named v = judged(kDollars, {contender("pull", 0.875, 1, of), contender("colocated", 1.0, 0, of)});
    const bool now = v.decision == Decision::decided;
    if (now != decided) {
      ++changes;
      EXPECT_EQ(e, 13);
    }
    EXPECT_TRUE(decided || !now);
    decided = now;
  }
  EXPECT_EQ(changes, 1);
}

TEST(Verdict, AnyFigureOfTheSummaryHasItsSentence) {
  const Named v = judged(find_objective("min:cache.preemptions", "x"),
                         {contender("pull", 50.0, 1), contender("colocated", 100.0, 0)});
  EXPECT_TRUE(says(v.text, "pull is 50 % lower in cache.preemptions than colocated")) << v.text;
  for (const NamedObjective& named : kObjectives) {
    const Named of =
        judged(find_objective(named.name, "x"), {contender("a", 1.0, 1), contender("b", 4.0, 0)});
    EXPECT_FALSE(says(of.text, " in " + std::string(named.name) + " than"))
        << "no phrase of its own: " << of.text;
  }
}

}  // namespace
}  // namespace pdsim
