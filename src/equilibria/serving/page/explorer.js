"use strict";
// Page of `equilibria explore`: sends requests to its own server and draws the responses.
const $ = (id) => document.getElementById(id);
let models = [], model = null, picture = null, solve = null, timer = null, working = null;

const short = (x) => x === null || x === undefined ? "–" : Math.abs(x) >= 1e-3 && Math.abs(x) < 1e4 ? String(Number(x.toPrecision(3))) : x.toExponential(1);
const share = (x) => x === null ? "–" : (100 * x).toFixed(x > .995 || x < .005 ? 1 : 0) + " %";

function trouble(text) { $("trouble").textContent = text; $("trouble").hidden = !text; }

function request(path, body, values) {
  const address = new URL(path, location.href);
  for (const [key, value] of Object.entries(values || {})) address.searchParams.set(key, value);
  return fetch(address, body ? { method: "POST", body, signal: working.signal } : {});
}

async function ask(path, body, values) {
  const response = await request(path, body, values);
  const result = await response.json().catch(() => ({ error: "the server's response cannot be read" }));
  if (!response.ok) throw new Error(result.error || response.statusText);
  return result;
}

// Like `ask` for responses in lines of JSON: calls `show` for each line as it arrives.
async function askLines(path, body, values, show) {
  const response = await request(path, body, values);
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error || response.statusText);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = "", piece = await reader.read(); !piece.done; piece = await reader.read()) {
    const lines = (text + piece.value).split("\n");
    text = lines.pop();
    for (const line of lines) {
      const result = JSON.parse(line);
      if (result.error) throw new Error(result.error);
      show(result);
    }
  }
}

// Run `work` and show its errors. Earlier and scheduled requests are aborted, and the server stops them.
async function guarded(panel, work) {
  clearTimeout(timer);
  if (working) { working.abort(); working.panel.classList.remove("waiting"); }
  const current = working = Object.assign(new AbortController(), { panel });
  panel.classList.add("waiting");
  try { trouble(""); await work(); } catch (error) { if (working === current) trouble(error.message); }
  finally { if (working === current) panel.classList.remove("waiting"); }
}

// Charts ---------------------------------------------------------------------
function node(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function chart(svg, title, lines, mark, log = true, places = null) {
  const W = 340, H = 200, left = 44, right = 8, top = 40, bottom = 26;
  svg.replaceChildren(); svg.setAttribute("viewBox", `0 0 ${W} ${H}`); svg.setAttribute("aria-label", title);
  svg.append(node("text", { x: 0, y: 12, class: "title" }, title));
  const numbers = lines.flatMap((line) => line.values).filter((v) => v !== null && (!log || v > 0));
  if (!numbers.length) { svg.append(node("text", { x: left, y: H / 2 }, "no data")); return; }
  const scale = log ? Math.log10 : (v) => v;
  let low = Math.min(...numbers.map(scale)), high = Math.max(...numbers.map(scale));
  if (high - low < 1e-9) { low -= 1; high += 1; }
  const count = places ? places[places.length - 1] + 1 : Math.max(...lines.map((line) => line.values.length));
  const x = (k) => left + (W - left - right) * (count > 1 ? (places ? places[k] : k) / (count - 1) : .5);
  const y = (v) => top + (H - top - bottom) * (1 - (scale(v) - low) / (high - low));
  for (let i = 0; i <= 3; i++) {
    const at = low + (high - low) * i / 3, value = log ? 10 ** at : at;
    svg.append(node("line", { x1: left, x2: W - right, y1: y(value), y2: y(value), stroke: "var(--line)" }));
    svg.append(node("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, log ? value.toExponential(0) : short(value)));
  }
  svg.append(node("text", { x: left, y: H - 6 }, "0"), node("text", { x: W - right, y: H - 6, "text-anchor": "end" }, `iteration ${count - 1}`));
  lines.forEach((line, number) => {
    const points = line.values.map((v, k) => v === null || (log && v <= 0) ? null : [x(k), y(v)]).filter(Boolean);
    svg.append(node("polyline", { points: points.map((p) => p.map((c) => c.toFixed(1)).join()).join(" "), fill: "none", stroke: line.color, "stroke-width": 2, "stroke-dasharray": line.dashed ? "5 4" : "none" }));
    const name = node("text", { x: left + 110 * number, y: top - 10 }, line.name);
    name.style.fill = line.color;
    svg.append(name);
    const here = line.values[mark];
    if (here !== null && here !== undefined && (!log || here > 0)) svg.append(node("circle", { cx: x(mark), cy: y(here), r: 4, fill: line.color }));
  });
}

// Model and image -------------------------------------------------------------
function choose(name) {
  model = models.find((one) => one.name === name);
  $("about").textContent = model.about || model.model;
  $("formula").textContent = model.formula || "";
  $("solver").replaceChildren(...model.solvers.map((s) => new Option(s, s, s === "auto", s === "auto")));
  document.querySelectorAll(".knob").forEach((old) => old.remove());
  for (const knob of model.knobs) {
    const label = document.createElement("label"); label.className = "knob";
    const output = document.createElement("output"), input = document.createElement("input");
    Object.assign(input, { type: "range", min: Math.min(knob.least, knob.value), max: Math.max(knob.most, knob.value), step: knob.step, value: knob.value, name: knob.name });
    output.textContent = short(knob.value);
    input.addEventListener("input", () => { output.textContent = short(Number(input.value)); soon(follow); });
    label.append(knob.label + " ", output, input); $("knobs").append(label);
  }
  $("samples").replaceChildren(...model.samples.map((source, number) => {
    const button = document.createElement("button"), image = new Image();
    image.src = source; image.alt = `sample ${number + 1}`; button.type = "button"; button.append(image);
    button.addEventListener("click", () => {
      document.querySelectorAll("#samples button").forEach((b) => b.setAttribute("aria-pressed", b === button));
      take(bytesOf(source));
    });
    return button;
  }));
  const first = $("samples").querySelector("button");
  if (first) first.click(); else { wipe(); refresh(); }
}

function bytesOf(source) {
  const text = atob(source.split(",")[1]);
  return new Blob([Uint8Array.from(text, (c) => c.charCodeAt(0))], { type: "image/png" });
}
function take(blob) { picture = blob; refresh(); }
function refresh() {
  if ($("panel-solve").hidden === false) follow();
  else if ($("panel-fool").hidden === false) fool();
  else if (!photo) { const first = $("photos").querySelector("button"); if (first) first.click(); }
}
function soon(work) { clearTimeout(timer); timer = setTimeout(work, 150); }

const pad = $("pad"), pen = pad.getContext("2d");
let drawing = false;
function wipe() { pen.fillStyle = "#000"; pen.fillRect(0, 0, pad.width, pad.height); $("hint").hidden = false; }
function at(event) { const box = pad.getBoundingClientRect(); return [(event.clientX - box.left) * pad.width / box.width, (event.clientY - box.top) * pad.height / box.height]; }
pad.addEventListener("pointerdown", (event) => { drawing = true; $("hint").hidden = true; pad.setPointerCapture(event.pointerId); pen.strokeStyle = "#fff"; pen.lineWidth = 20; pen.lineCap = pen.lineJoin = "round"; pen.beginPath(); pen.moveTo(...at(event)); pen.lineTo(...at(event)); pen.stroke(); });
pad.addEventListener("pointermove", (event) => { if (drawing) { pen.lineTo(...at(event)); pen.stroke(); } });
pad.addEventListener("pointerup", () => { drawing = false; document.querySelectorAll("#samples button").forEach((b) => b.setAttribute("aria-pressed", false)); pad.toBlob((blob) => take(blob), "image/png"); });
$("clear").addEventListener("click", wipe);
$("file").addEventListener("change", () => { if ($("file").files[0]) take($("file").files[0]); });

// Watch it solve -----------------------------------------------------------------
function follow() {
  if (!picture || !model) return Promise.resolve();
  const values = { model: model.name, solver: $("solver").value, tolerance: 10 ** Number($("tolerance").value) };
  document.querySelectorAll(".knob input").forEach((input) => { values[input.name] = input.value; });
  return guarded($("panel-solve"), async () => {
    solve = await ask("explorer/follow", picture, values); $("seen").src = solve.picture;
    $("step").max = Math.max(0, solve.steps.length - 1); $("step").value = $("step").max;
    show();
  });
}

function verdict(answer) {
  const parts = [`<strong></strong>`, `<p>${share(answer.confidence)} · ${answer.iterations ?? "–"} iterations${answer.converged === false ? " · <span class='bad'>not converged</span>" : ""}</p>`];
  parts.push(answer.certified ? `<p><span class="badge good">certified class</span></p>` : `<p><span class="badge bad">no certificate</span></p>`);
  if (answer.margin !== null) parts.push(`<p class="small">margin ${short(answer.margin)} ± ${short(answer.margin_error)} to the next class</p>`);
  if (answer.radius) parts.push(`<p class="small">the class cannot change within a distance of ${short(answer.radius)} (L2)</p>`);
  const box = document.createElement("div"); box.innerHTML = parts.join("");
  box.querySelector("strong").textContent = answer.label ?? "no prediction";
  if (answer.reason) { const why = document.createElement("p"); why.className = "small"; why.textContent = answer.reason; box.append(why); }
  return box;
}

function show() {
  if (!solve) return;
  $("verdict").replaceChildren(verdict(solve.answer));
  const k = Number($("step").value), steps = solve.steps, here = steps[k];
  if (!here) { $("at").textContent = "steps are not available for this model"; return; }
  $("feature").src = here.feature; $("at").textContent = `feature after ${k + 1} of ${steps.length} steps`;
  chart($("chart-residual"), "Residual and proven error bound", [
    { name: "‖T(y) − y‖", values: steps.map((s) => s.residual), color: "var(--accent)" },
    { name: "bound on ‖y − y*‖", values: steps.map((s) => s.error), color: "var(--warm)", dashed: true }].filter((l) => l.values.some((v) => v !== null)), k);
  const values = steps.map((s) => s.objective).filter((v) => v !== null);
  const lowest = values.length ? Math.min(...values) : 0;
  chart($("chart-objective"), "Hidden objective above its minimum", values.length ? [{ name: "G(y) − min", values: steps.map((s) => s.objective === null ? null : Math.max(s.objective - lowest, 0)), color: "var(--accent)" }] : [], k);
  const bars = barsOf(here.shares.map((v) => v ?? 0)), tenths = wholeNumbers(bars.map((bar) => bar.value), 1000);
  $("shares").replaceChildren(...bars.map(({ label, value }, place) => {
    const bar = document.createElement("div"); bar.className = "bar";
    const name = document.createElement("span"), track = document.createElement("span"), fill = document.createElement("i"), text = document.createElement("span");
    name.textContent = label; fill.style.width = `${100 * value}%`; track.append(fill); text.textContent = `${(tenths[place] / 10).toFixed(1)} %`;
    bar.append(name, track, text); return bar;
  }));
}

// All classes, or the most likely ones in class order and the sum of the others.
const MAX_BARS = 10;
function barsOf(shares) {
  const ranked = shares.map((value, i) => ({ value, i, label: model.classes[i] })).sort((a, b) => b.value - a.value);
  const all = ranked.length <= MAX_BARS, top = (all ? ranked : ranked.slice(0, MAX_BARS - 1)).sort((a, b) => a.i - b.i);
  const rest = ranked.slice(MAX_BARS - 1);
  return all ? top : [...top, { value: rest.reduce((sum, one) => sum + one.value, 0), label: `${rest.length} others` }];
}

// Whole numbers with sum `total`, proportional to values with sum 1 (largest remainder method).
function wholeNumbers(values, total) {
  const numbers = values.map((value) => Math.floor(total * value));
  if (!values.some((value) => value > 0)) return numbers;
  const byRemainder = values.map((value, i) => i).sort((a, b) => (total * values[b] - numbers[b]) - (total * values[a] - numbers[a]));
  const missing = total - numbers.reduce((sum, one) => sum + one, 0);
  byRemainder.slice(0, Math.max(0, missing)).forEach((i) => { numbers[i] += 1; });
  return numbers;
}

$("step").addEventListener("input", show);
$("solver").addEventListener("change", follow);
$("tolerance").addEventListener("input", () => { $("tolerance-value").textContent = (10 ** Number($("tolerance").value)).toExponential(1); soon(follow); });
$("play").addEventListener("click", () => {
  let k = 0;
  const run = setInterval(() => { $("step").value = k; show(); if (++k > Number($("step").max)) clearInterval(run); }, 250);
});

// Attack it -----------------------------------------------------------------------
function ruler(eps, radius, changed) {
  const svg = $("ruler"), W = Math.min(560, Math.max(240, $("ruler").clientWidth)), H = 64;
  svg.replaceChildren(); svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.setAttribute("aria-label", `attack distance ${short(eps)}, certified radius ${short(radius || 0)}`);
  const low = -4, high = Math.log10(3.2), x = (v) => 10 + (W - 20) * Math.min(1, Math.max(0, (Math.log10(Math.max(v, 1e-4)) - low) / (high - low)));
  const within = (place) => Math.min(W - 45, Math.max(45, place));
  svg.append(node("line", { x1: 10, x2: W - 10, y1: 30, y2: 30, stroke: "var(--line)", "stroke-width": 8, "stroke-linecap": "round" }));
  if (radius > 0) svg.append(node("line", { x1: 10, x2: x(radius), y1: 30, y2: 30, stroke: "var(--good)", "stroke-width": 8, "stroke-linecap": "round" }), node("text", { x: within(x(radius)), y: 18, "text-anchor": "middle" }, `certified: ${short(radius)}`));
  svg.append(node("circle", { cx: x(eps), cy: 30, r: 8, fill: changed ? "var(--warm)" : "var(--accent)" }), node("text", { x: within(x(eps)), y: 54, "text-anchor": "middle" }, `ε = ${short(eps)}`));
}

function fool() {
  if (!picture || !model) return Promise.resolve();
  const eps = 10 ** Number($("eps").value);
  return guarded($("panel-fool"), async () => {
    const result = await ask("explorer/fool", picture, { model: model.name, eps, method: $("method").value });
    const plain = await ask("explorer/follow", picture, { model: model.name });
    $("before").src = plain.picture; $("difference").src = result.difference; $("after").src = result.picture;
    $("before-says").textContent = `${result.before.label}, ${share(result.before.confidence)}`;
    $("after-says").textContent = `${result.after.label}, ${share(result.after.confidence)}`;
    ruler(eps, result.before.radius, result.changed);
    $("held").className = "verdict " + (result.changed ? "bad" : "good");
    $("held").textContent = result.changed ? `The class changed at a distance of ${short(result.distance)}. ${result.before.radius ? `The certificate covers distances up to ${short(result.before.radius)}.` : "There was no certificate."}`
      : result.promised ? "The class held, as certified: no attack within this distance can change it." : "The class held against this attack. It is not certified against all attacks within this distance.";
  });
}
$("eps").addEventListener("input", () => { $("eps-value").textContent = short(10 ** Number($("eps").value)); soon(fool); });
$("method").addEventListener("change", fool);
$("fool").addEventListener("click", fool);

// A photograph --------------------------------------------------------------------
let photo = null;
function photograph() {
  if (!photo) return Promise.resolve();
  const trace = [];
  return guarded($("panel-photo"), () => askLines("explorer/photo", photo, { noise: $("noise").value }, (result) => {
    $("panel-photo").classList.remove("waiting");
    if (result.noisy) {
      $("photo-seen").src = $("photo-restored").src = result.noisy; $("photo-bound").textContent = "";
      $("photo-before").textContent = `with noise: ${result.before.toFixed(1)} dB`; $("photo-after").textContent = "restoring …";
      return;
    }
    trace.push({ at: result.iteration, value: result.objective });
    const ended = "bound" in result, minimum = Math.min(...trace.map((one) => one.value));
    $("photo-restored").src = result.restored;
    $("photo-after").textContent = (ended ? "restored: " : `restoring, iteration ${result.iteration}: `) + `${result.after.toFixed(1)} dB`;
    chart($("chart-photo"), ended ? "Hidden objective above its minimum" : "Hidden objective", [{ name: ended ? "G(y) − min" : "G(y)", values: trace.map((one) => ended ? Math.max(one.value - minimum, 0) : one.value), color: "var(--accent)" }], trace.length - 1, ended, trace.map((one) => one.at));
    if (ended && result.bound !== null) $("photo-bound").textContent = `Proven distance to the exact minimizer: at most ${short(result.bound)} of 255 gray levels (root mean square).`;
  }));
}
let latest = 0;
async function takePhoto(download, button) {
  const number = ++latest, blob = await download;
  if (number !== latest) return;
  photo = blob;
  document.querySelectorAll("#photos button").forEach((b) => b.setAttribute("aria-pressed", b === button));
  await photograph();
}
ask("explorer/photos").then((names) => $("photos").replaceChildren(...names.map((name) => {
  const button = document.createElement("button"); button.type = "button"; button.textContent = name;
  button.addEventListener("click", () => takePhoto(fetch("explorer/photos/" + name).then((response) => response.blob()), button));
  return button;
}))).catch(() => {});
$("photo").addEventListener("change", () => { if ($("photo").files[0]) takePhoto($("photo").files[0], null); });
$("noise").addEventListener("input", () => { $("noise-value").textContent = $("noise").value; soon(photograph); });

// Tabs and start --------------------------------------------------------------------
const tabs = ["solve", "fool", "photo"];
function open(name) {
  for (const one of tabs) { $("tab-" + one).setAttribute("aria-selected", one === name); $("panel-" + one).hidden = one !== name; }
  $("choose").hidden = name === "photo";
  document.querySelector("main").style.gridTemplateColumns = name === "photo" ? "1fr" : "";
  refresh();
}
for (const name of tabs) $("tab-" + name).addEventListener("click", () => open(name));
$("tolerance-value").textContent = "1.0e-4"; $("eps-value").textContent = short(10 ** Number($("eps").value)); $("noise-value").textContent = $("noise").value;
wipe();
ask("explorer/models").then((result) => {
  models = result;
  $("model").replaceChildren(...models.map((one) => new Option(one.name, one.name)));
  $("model").addEventListener("change", () => choose($("model").value));
  choose(models[0].name);
  document.body.dataset.ready = "yes";
}).catch((error) => trouble(error.message));
