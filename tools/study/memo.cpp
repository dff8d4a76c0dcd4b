// The plan's report as one page of Markdown, for those who decide and for those who check.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "tools/study/plan.hpp"
#include "tools/study/text.hpp"

namespace pdsim {

namespace {

using Json = nlohmann::ordered_json;

// Lines of each list that may be long: chosen, so that the page stays one.
constexpr std::size_t kMostRejected = 4, kMostNotes = 3, kMostExcluded = 3, kMostFlips = 4;

// Everything that a run leaves out, whatever it is of.
constexpr std::string_view kNotModelled =
    "Not modelled: failures and what they cost to operate, cold starts and autoscaling, "
    "other tenants of the network, quality of answers, prices below the list (savings plans) and data "
    "transfer fees.";

template <typename... Args>
void put(std::string& out, fmt::format_string<Args...> format, Args&&... args) {
  fmt::format_to(std::back_inserter(out), format, std::forward<Args>(args)...);
}

std::string text(const Json& value) {
  return value.get<std::string>();
}

std::string number(const Json& value, const char* format) {
  return value.is_null() ? "unknown" : fmt::format(fmt::runtime(format), value.get<double>());
}

// The first `most` of a list, and how many are left.
void put_list(std::string& out, const Json& list, std::size_t most,
              const std::function<void(const Json&)>& put_one) {
  for (std::size_t i = 0; i < std::min(list.size(), most); ++i) put_one(list[i]);
  if (list.size() > most) put(out, "- And {} more in the report (`--json`).\n", list.size() - most);
}

std::string slo_text(const Json& slo) {
  std::string all;
  for (const auto& [metric, bounds] : slo.items()) {
    for (const auto& [percentile, ms] : bounds.items()) {
      all += fmt::format("{}{} of {} at most {:g} ms", all.empty() ? "" : ", ", percentile,
                         metric == "ttft_ms" ? "TTFT" : "TPOT", ms.get<double>());
    }
  }
  return all;
}

void put_recommendation(std::string& out, const Json& report) {
  const Json &r = report["recommendation"], &q = report["question"];
  put(out, "## Recommendation\n");
  if (r.is_null()) {
    put(out, "Nothing on the menu meets the SLO at {:.4g} requests/s.\n", q["rate"].get<double>());
    const Json& miss = report["nearest_miss"];
    if (!miss.is_null()) {
      put(out, "Nearest: {}. {} {}\n", text(miss["name"]), text(miss["text"]), text(miss["help"]));
    }
    return;
  }
  const Json& at = r["at_rate"];
  put(out, "**{}**: **{} USD a month** ({:g} h at {:.2f} USD/h) for {:.4g} requests/s.\n\n", text(r["name"]),
      grouped(r["usd_per_month"].get<double>()), kHoursAMonth, r["usd_per_hour"].get<double>(),
      q["rate"].get<double>());
  put(out,
      "- {} USD per million output tokens and {} per request within the SLO, whole instances billed, {} of "
      "{} GPUs "
      "idle, {:.0f} s of draining included.\n",
      number(at["usd_per_million_output_tokens"], "{:.2f}"), number(at["usd_per_request_in_slo"], "{:.5f}"),
      r["idle_gpus"].get<int>(), r["gpus"].get<int>(), at["drain_s"].get<double>());
  if (const Json& margin = r["margin"]; !margin.is_null() && !margin["decided"].get<bool>()) {
    put(out, "- **{}**\n", text(margin["text"]));
  }
  put(out, "- It carries {}{:.3g} requests/s, {:.2f} times what is asked",
      r["capacity_is_more"].get<bool>() ? "more than " : "", r["capacity"].get<double>(),
      r["headroom"].get<double>());
  if (const Json& capacity = r["at_capacity"]; !capacity.is_null()) {
    put(out, "; there {}", text(capacity["bound_by"]["text"]));
    if (const Json& limit = capacity["limit"]; !limit.is_null()) {
      put(out, "; at {:.3g} requests/s {}", limit["rate"].get<double>(), text(limit["text"]));
    }
  }
  put(out, ".\n");
  std::string met;
  for (const Json& b : at["slo"]) {
    met += fmt::format("{}{} {} is {:.4g} of {:g} ms", met.empty() ? "" : ", ", text(b["percentile"]),
                       b["metric"] == "ttft_ms" ? "TTFT" : "TPOT", b["value"].get<double>(),
                       b["bound"].get<double>());
  }
  put(out, "- At the rate asked for {}.\n", met);
  if (const std::string verdict = text(report["verdict"]["text"]); !verdict.empty())
    put(out, "- {}\n", verdict);
  if (const Json& curve = report["curve"]; !curve.is_null()) {
    put(out, "- {} {}\n", text(curve["text"]), text(curve["basis"]));
  }
}

void put_assumed(std::string& out, const Json& report) {
  const Json &q = report["question"], &trace = q["trace"];
  put(out, "\n## Assumed\n");
  put(out, "- Model {}, weights {}, KV {}.\n", text(q["model"]), text(q["weights_dtype"]),
      text(q["kv_dtype"]));
  put(out,
      "- Trace {} ({} requests, {:.0f} prompt and {:.0f} output tokens in the mean), played at {:.4g} "
      "requests/s (from "
      "{}): {:.0f} s.\n",
      text(trace["name"]), trace["requests"].get<std::int64_t>(), trace["prompt_tokens"].get<double>(),
      trace["output_tokens"].get<double>(), q["rate"].get<double>(), text(q["rate_from"]),
      trace["span_s"].get<double>());
  put(out, "- SLO: {}; every request served.\n", slo_text(q["slo"]));
  std::string menu;
  for (const Json& offer : q["menu"]) {
    if (offer["usd_per_hour"].is_null()) continue;
    menu += fmt::format("{}{} ({} x {}) {:.2f}, {} ({})", menu.empty() ? "" : "; ", text(offer["instance"]),
                        offer["gpus"].get<int>(), text(offer["gpu"]), offer["usd_per_hour"].get<double>(),
                        text(offer["as_of"]), text(offer["source"]));
  }
  put(out, "- USD/h: {}.\n", menu);
  put(out, "- At most {} instance{}{}.\n", q["max_instances"].get<int>(), q["max_instances"] == 1 ? "" : "s",
      q["mixed"].get<bool>() ? ", prefill and decode also on different kinds" : "");
  put_list(out, report["notes"], kMostNotes, [&](const Json& note) { put(out, "- {}\n", text(note)); });
}

std::string why_not(const Json& option, const Json& recommended) {
  if (option["capacity"].is_null()) return "does not meet the SLO at any load";
  if (!option["suffices"].get<bool>()) {
    return fmt::format("carries {:.3g} requests/s only", option["capacity"].get<double>());
  }
  if (recommended.is_null()) return "";
  const double more = option["usd_per_hour"].get<double>() / recommended["usd_per_hour"].get<double>() - 1;
  if (more > 0.005) return fmt::format("{:.0f} % dearer", 100 * more);
  return more < -0.005 ? "cheaper, by less than can be told (see the verdict)"
                       : "costs the same, less simple";
}

void put_rejected(std::string& out, const Json& report) {
  put(out,
      "\n## Rejected\n| option | USD a month | carries, requests/s | why not |\n| --- | ---: | ---: | --- "
      "|\n");
  std::size_t rows = 0, left = 0;
  const Json& recommended = report["recommendation"];
  for (const Json& o : report["options"]) {
    if (!recommended.is_null() && o["name"] == recommended["name"]) continue;
    if (rows++ >= kMostRejected) {
      ++left;
      continue;
    }
    const bool none = o["capacity"].is_null();
    put(out, "| {} | {} | {} | {} |\n", none ? text(o["rented"]) + ", " + text(o["class"]) : text(o["name"]),
        grouped(o["usd_per_month"].get<double>()), none ? "0" : number(o["capacity"], "{:.3g}"),
        why_not(o, recommended));
  }
  for (const Json& u : report["undeployable"]) {
    std::string needs;
    for (const Json& f : u["needs"]) {
      needs += fmt::format("{}{} ({}, {})", needs.empty() ? "" : ", ", text(f["feature"]), text(f["since"]),
                           text(f["source"]));
    }
    put(out, "| {} | {} | | not deployable: needs {}; {} |\n", text(u["kind"]),
        u["usd_per_hour"].is_null() ? "" : grouped(u["usd_per_hour"].get<double>() * kHoursAMonth), needs,
        u["would_be_cheaper"].get<bool>() ? "would be cheaper as " + text(u["name"])
                                          : "would not be cheaper");
  }
  if (left > 0 || !report["excluded"].empty()) put(out, "\n");
  if (left > 0) put(out, "- And {} more in the report (`--json`).\n", left);
  put_list(out, report["excluded"], kMostExcluded, [&](const Json& e) {
    put(out, "- {} candidates, such as {}, cannot work: {}.\n", e["candidates"].get<std::int64_t>(),
        text(e["example"]), text(e["reason"]));
  });
}

void put_evidence(std::string& out, const Json& report) {
  put(out, "\n## Evidence\n");
  const Json& e = report["evidence"];
  if (!e.is_null()) {
    put(out, "Grade: **{}**. {}\n", text(e["grade"]), text(e["text"]));
    std::string off;
    for (const auto& [key, what] :
         {std::pair("ttft", "TTFT"), std::pair("tpot", "TPOT"), std::pair("throughput", "throughput")}) {
      const Json& error = e[key];
      off += fmt::format("{}{} ", off.empty() ? "" : "; ", what);
      const int runs = error["n"].get<int>(), rows = error.value("rows", 0);
      if (runs == 0 && rows == 0) {
        off += "no measurement to compare with";
      } else {
        off += fmt::format("{:.0f} % in the median, {:.0f} % at p90, ", 100 * error["median"].get<double>(),
                           100 * error["p90"].get<double>());
        off += runs > 0 ? fmt::format("over {} measured runs", runs)
                        : fmt::format("as scaling to other GPUs costs over {} measured kernel timings", rows);
      }
    }
    put(out, "- Off by: {}{}.\n", off,
        text(e["source"]).empty() ? "" : fmt::format(" ({})", text(e["source"])));
    if (!text(e["to_do"]).empty()) put(out, "- Better evidence: {}.\n", text(e["to_do"]));
  }
  const std::string to_decide = text(report["verdict"]["to_decide"]);
  if (!to_decide.empty()) put(out, "- To decide it: {}.\n", to_decide);
  put(out, "\n{}\n", kNotModelled);
}

void put_flips(std::string& out, const Json& report) {
  put(out, "\n## What flips it\n");
  if (report["flips"].empty()) {
    put(out, "Nothing to flip.\n");
    return;
  }
  Json flipping = Json::array();
  std::string stays;
  for (const Json& row : report["flips"]) {
    if (row["flips"].get<bool>()) {
      flipping.push_back(row);
      continue;
    }
    stays += fmt::format("{}{} {:+.0f} %", stays.empty() ? "" : ", ", text(row["what"]),
                         100 * (row["factor"].get<double>() - 1));
  }
  put_list(out, flipping, kMostFlips, [&](const Json& row) {
    put(out, "- {:+.0f} % {}: {}.\n", 100 * (row["at"].get<double>() - 1), text(row["what"]),
        row["winner"].is_null() ? "nothing on the menu suffices" : text(row["winner"]) + " wins");
  });
  if (!stays.empty()) put(out, "- The winner stays the same at: {}.\n", stays);
}

// One worker's command line. Of the flags, names are vLLM's own.
void put_serve(std::string& out, const Json& report, const Json& pool) {
  const Json &q = report["question"], &scenario = report["scenario"];
  const auto found =
      std::ranges::find_if(scenario["pools"], [&](const Json& p) { return p["role"] == pool["role"]; });
  const Json& engine = (*found)["engine"];
  std::string line = fmt::format("vllm serve {} --tensor-parallel-size {}", text(q["model_id"]),
                                 pool["tensor_parallel"].get<int>());
  const auto add = [&](const char* flag, const char* key) {
    const auto value = engine[key].get<std::int64_t>();
    if (value > 0) line += fmt::format(" {} {}", flag, value);
  };
  line += fmt::format(" --block-size {}", engine["block_size"].get<int>());
  add("--max-num-seqs", "max_num_seqs");
  add("--max-num-batched-tokens", "max_num_batched_tokens");
  add("--max-model-len", "max_model_len");
  line += fmt::format(" --gpu-memory-utilization {:g}", engine["gpu_memory_utilization"].get<double>());
  if (!engine["enable_prefix_caching"].get<bool>()) line += " --no-enable-prefix-caching";
  if (q["kv_dtype"] == "fp8") line += " --kv-cache-dtype fp8";
  if (pool["role"] != "colocated") {
    const Json& transfer = scenario["transfer"];
    const bool push = text(transfer["mode"]).starts_with("push");
    Json extra = Json::object();
    if (transfer["backend"] == "libfabric") extra["backends"] = {"LIBFABRIC"};
    if (transfer["bidirectional"].get<bool>()) {
      extra["bidirectional_kv_xfer"] = true;
      extra["kv_recompute_threshold"] = transfer["kv_recompute_threshold"];
    }
    Json config = {{"kv_connector", push ? "NixlPushConnector" : "NixlConnector"}, {"kv_role", "kv_both"}};
    if (!extra.empty()) config["kv_connector_extra_config"] = extra;
    line += fmt::format(" \\\n    --kv-transfer-config '{}'", config.dump());
  }
  put(out, "# {} x {} on {}\n{}\n", pool["replicas"].get<int>(), text(pool["role"]), text(pool["instance"]),
      line);
}

void put_check(std::string& out, const Json& report, const std::string& command) {
  put(out, "\n## Check it on real GPUs\n");
  const Json& r = report["recommendation"];
  if (r.is_null()) {
    put(out, "There is nothing to check.\n");
    return;
  }
  put(out,
      "As far as is known; flags change between releases (`vllm serve --help`). Give each worker its GPUs "
      "(CUDA_VISIBLE_DEVICES) and ports{}.\n```sh\n",
      r["kind"] == "colocated"
          ? ""
          : " (VLLM_NIXL_SIDE_CHANNEL_PORT), and put a router for disaggregated prefill before "
            "them");
  for (const Json& pool : r["pools"]) put_serve(out, report, pool);
  const Json& q = report["question"];
  put(out,
      "vllm bench serve --model {} --request-rate {:.4g} --num-prompts {} \\\n"
      "    --save-result --save-detailed --result-filename bench.json  # with your prompts: --dataset-name "
      "custom\n",
      text(q["model_id"]), q["rate"].get<double>(), q["trace"]["requests"].get<std::int64_t>());
  put(out,
      "{} --json | python3 -c 'import json, sys; json.dump(json.load(sys.stdin)[\"scenario\"], sys.stdout)' "
      "> deployment.json\n",
      command);
  put(out, "pdsim validate run deployment.json --bench bench.json\n```\n");
}

}  // namespace

std::string plan_memo(const Json& given, const std::string& command) {
  Json report = given;  // one that was interrupted lacks what was not come to
  const Json absent = {{"verdict", {{"text", ""}, {"to_decide", ""}}},
                       {"curve", nullptr},
                       {"flips", Json::array()},
                       {"undeployable", Json::array()},
                       {"nearest_miss", nullptr}};
  for (const auto& [key, value] : absent.items()) {
    if (!report.contains(key)) report[key] = value;
  }
  std::string out;
  put(out, "# {}: the cheapest deployment for {} at {:.4g} requests/s\n\n", text(report["name"]),
      text(report["question"]["model"]), report["question"]["rate"].get<double>());
  if (report["status"] == kPlanStatus[2]) put(out, "**INTERRUPTED**: what was found until then.\n\n");
  put_recommendation(out, report);
  put_assumed(out, report);
  put_rejected(out, report);
  put_evidence(out, report);
  put_flips(out, report);
  put_check(out, report, command);
  const Json& inputs = report["inputs"];
  put(out, "\n## Reproduce\n```sh\n{}\n```\n", command);
  put(out, "pdsim {}; seed {}. SHA-256 of the plan {}, of the scenario {}, of the trace {}{}.\n",
      PDSIM_VERSION, inputs["seed"].get<std::uint64_t>(), text(inputs["plan"]), text(inputs["scenario"]),
      text(inputs["trace"]),
      text(inputs["profile"]).empty() ? "" : ", of the kernel profile " + text(inputs["profile"]));
  return out;
}

}  // namespace pdsim
