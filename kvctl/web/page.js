"use strict";
// The status page: draws what /v1/page/events tells. Text goes in as text, never as markup.

const KEPT = 300;
const RETRY_MS = 2000;
const SILENCE_MS = 8000;
const CURVES = ["capacity", "budget", "forecast", "used"];
const SHARES = new Set(["margin", "enforce"]);
const SVG = "http://www.w3.org/2000/svg";
const GOOD = new Set(["up", "active"]);
const FAIR = new Set(["late", "stale", "no_telemetry", "trial", "starting", "draining", "bypass"]);

const byId = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tokens = (value) => (value === null || value === undefined ? "?" : whole.format(value));
const share = (value) => (value === null || value === undefined ? "?" : `${(value * 100).toFixed(1)} %`);
const seconds = (value) => {
  if (value === null || value === undefined) return "-";
  if (value < 90) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
};
const gib = (value) => (value === null || value === undefined ? "?" : `${(value / 2 ** 30).toFixed(1)} GiB`);

const curves = new Map(); // engine: points of the last five minutes
const shown = new Map(); // engine: its section
let paused = false;
let heardAt = 0;
let source = null;
let said = "";

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A word of the metrics: as it is there, but it may break after an underscore.
function putWord(node, word) {
  if (node.textContent === word) return;
  node.replaceChildren(...word.split(/(?<=_)/).flatMap((part, at) => (at ? [document.createElement("wbr"), part] : [part])));
}

function badge(node, word) {
  put(node, word.replaceAll("_", " "));
  node.hidden = false;
  node.classList.toggle("good", GOOD.has(word));
  node.classList.toggle("bad", !GOOD.has(word) && !FAIR.has(word));
}

function element(kind, text, className) {
  const made = document.createElement(kind);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function row(cells) {
  const made = document.createElement("tr");
  made.append(...cells.map(([text, className]) => element("td", text, className)));
  return made;
}

function section(name) {
  if (!shown.has(name)) {
    const made = byId("engine").content.firstElementChild.cloneNode(true);
    const title = `engine-${shown.size}`;
    made.querySelector("h2").id = title;
    made.setAttribute("aria-labelledby", title);
    const region = made.querySelector(".scroll");
    region.setAttribute("aria-label", `ranks of ${name}`);
    put(made.querySelector(".name"), name);
    byId("engines").append(made);
    shown.set(name, made);
  }
  return shown.get(name);
}

function drawEngine(name, engine, override) {
  const at = section(name);
  const set = (className, text) => put(at.querySelector(`.${className}`), text);
  badge(at.querySelector(".state"), engine.state);
  set("headroom", tokens(engine.headroom_tokens));
  set("budget", tokens(engine.budget_tokens));
  set("forecast", tokens(engine.forecast_peak_tokens));
  set("used", tokens(engine.used_tokens));
  set("capacity", `${tokens(engine.capacity_tokens)}${engine.capacity_known ? "" : " (a guess)"}`);
  set("margin", share(engine.margin_ratio));
  const moved = at.querySelector(".moved");
  moved.hidden = !override;
  moved.title = override ? override.reason : "";
  put(moved, override ? `for ${seconds(override.left_s)}` : "");
  putWord(at.querySelector(".limit"), engine.binding_limit);
  set("leases", tokens(engine.leases));
  set("queue", queued(engine.queue));
  const pressing = Object.entries(engine.pressure).filter(([, factor]) => factor < 1);
  const pressure = pressing.map(([term, factor]) => `${term} ${share(factor)}`);
  set("why", [shown.size > 1 ? engine.sentence : "", pressure.length ? `Pressure: ${pressure.join(", ")}.` : ""].join(" ").trim());
  at.querySelector(".ranks tbody").replaceChildren(...engine.ranks.map((rank) => row([
    [rank.rank], [share(rank.kv_usage_ratio), "n"], [tokens(rank.running), "n"], [tokens(rank.waiting), "n"],
    [tokens(rank.preemptions_total), "n"], [`${seconds(rank.age_s)} ago`, "n"],
  ])));
  drawChart(at.querySelector(".chart"), name, engine);
}

function queued(queue) {
  if (!queue) return "off";
  const waiting = Object.values(queue.waiting).reduce((sum, each) => sum + each, 0);
  return waiting ? `${whole.format(waiting)}, ${seconds(queue.oldest_s)}` : "nobody";
}

function drawChart(svg, name, engine) {
  const points = curves.get(name) || [];
  const top = Math.max(1, ...points.map((each) => Math.max(each.capacity, each.forecast))) * 1.05;
  const end = points.length ? points[points.length - 1].at : 0;
  for (const curve of CURVES) {
    let path = svg.querySelector(`.${curve}`);
    if (!path) {
      path = document.createElementNS(SVG, "path");
      path.setAttribute("class", curve);
      svg.append(path);
    }
    path.setAttribute("d", line(points, curve, top, end));
  }
  svg.setAttribute("aria-label", `Budget ${tokens(engine.budget_tokens)}, forecast peak `
    + `${tokens(engine.forecast_peak_tokens)}, in use ${tokens(engine.used_tokens)}, `
    + `capacity ${tokens(engine.capacity_tokens)} KV tokens`);
}

function line(points, curve, top, end) {
  let path = "";
  let broken = true;
  for (const point of points) {
    const value = point[curve];
    if (value === null) { broken = true; continue; }
    const x = 600 * (1 - (end - point.at) / KEPT);
    path += `${broken ? "M" : "L"}${x.toFixed(1)} ${(160 * (1 - value / top)).toFixed(1)}`;
    broken = false;
  }
  return path;
}

function drawMinute(state) {
  const refused = Object.entries(state.refused_last_minute);
  const total = refused.reduce((sum, [, count]) => sum + count, 0);
  put(byId("minute"), `${whole.format(state.admitted_last_minute)} let in, ${whole.format(total)} refused`);
  byId("reasons").replaceChildren(...refused.map(([reason, count]) => {
    const item = document.createElement("li");
    const meter = document.createElement("meter");
    meter.max = total;
    meter.value = count;
    meter.setAttribute("aria-label", reason);
    item.append(meter, `${reason}: ${whole.format(count)}`);
    return item;
  }));
}

function drawRefusals(state) {
  const rows = state.refusals.map((each) => row([
    [`${seconds(Math.max(0, state.time - each.at))} ago`], [each.reason],
    [tokens(each.needed_tokens), "n"], [tokens(each.headroom_tokens), "n"],
    [seconds(each.retry_after_s), "n"], [each.engine],
  ]));
  const none = row([["none since the start"]]);
  none.firstChild.colSpan = 6;
  byId("refusals").querySelector("tbody").replaceChildren(...(rows.length ? rows : [none]));
}

function list(id, items, none) {
  byId(id).replaceChildren(...(items.length ? items : [none]).map((text) => element("li", text)));
}

// Of one engine its own sentence; of several the sums: each has its sentence beside its numbers.
function inShort(state) {
  const engines = Object.values(state.engines);
  if (engines.length < 2) return state.sentence;
  const sum = (read) => engines.reduce((total, each) => total + read(each), 0);
  const up = engines.filter((each) => each.state === "up").length;
  const waiting = sum((each) => Object.values(each.queue ? each.queue.waiting : {}).reduce((a, b) => a + b, 0));
  return `${up} of ${engines.length} engines up; headroom ${tokens(sum((each) => each.headroom_tokens))} of `
    + `${tokens(sum((each) => each.budget_tokens))} KV tokens, ${tokens(sum((each) => each.leases))} in flight`
    + (waiting ? `, ${tokens(waiting)} waiting` : "");
}

function draw(state) {
  put(byId("version"), state.version);
  badge(byId("mode"), state.mode);
  put(byId("sentence"), inShort(state));
  for (const [name, engine] of Object.entries(state.engines)) drawEngine(name, engine, state.overrides.margin);
  drawMinute(state);
  drawRefusals(state);
  const moved = Object.entries(state.overrides).map(([knob, each]) =>
    `${knob} = ${SHARES.has(knob) ? share(each.value) : each.value} by ${each.actor}, ${seconds(each.left_s)} left: ${each.reason}`);
  const drained = Object.entries(state.drains).map(([name, each]) =>
    `${name === "*" ? "all engines" : name} drained by ${each.actor} for ${seconds(each.for_s)}, over restarts`
    + (each.reason ? `: ${each.reason}` : ""));
  list("overrides", [...drained, ...moved], "none");
  list("cards", state.gpus.map((each) =>
    `${each.name}: ${gib(each.free_bytes)} of ${gib(each.total_bytes)} free`
    + (each.temperature_c === null ? "" : `, ${Math.round(each.temperature_c)} °C`)
    + (each.lost ? ", LOST" : "")), state.gpu_fault ? `none: ${state.gpu_fault.replaceAll("_", " ")}` : "none");
  announce(state);
}

// What a screen reader is told unasked: changes of state and mode, not every second's numbers.
function announce(state) {
  const states = Object.entries(state.engines).map(([name, engine]) => `${name} is ${engine.state}`);
  const now = [`kvctl is ${state.mode}`, ...states].join(", ").replaceAll("_", " ");
  if (now !== said) {
    said = now;
    put(byId("announce"), now);
  }
}

function remember(state) {
  for (const [name, engine] of Object.entries(state.engines)) {
    const points = curves.get(name) || [];
    points.push({
      at: state.time, capacity: engine.capacity_tokens, budget: engine.budget_tokens,
      forecast: engine.forecast_peak_tokens, used: engine.used_tokens,
    });
    while (points.length > KEPT) points.shift();
    curves.set(name, points);
  }
}

function connect() {
  if (source) source.close();
  heardAt = Date.now();
  source = new EventSource("v1/page/events");
  source.addEventListener("history", (event) => {
    for (const [name, points] of Object.entries(JSON.parse(event.data))) curves.set(name, points);
  });
  source.addEventListener("state", (event) => {
    heardAt = Date.now();
    const state = JSON.parse(event.data);
    remember(state);
    connection("live", true);
    if (!paused) draw(state);
  });
  source.addEventListener("error", () => connection("no answer from kvctl: numbers are old", false));
}

function connection(text, good) {
  const node = byId("connection");
  put(node, good && paused ? "paused" : text);
  node.classList.toggle("good", good);
  node.classList.toggle("bad", !good);
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
});
setInterval(() => {
  if (Date.now() - heardAt > SILENCE_MS) {
    connection("no answer from kvctl: numbers are old", false);
    connect();
  }
}, RETRY_MS);
connect();
