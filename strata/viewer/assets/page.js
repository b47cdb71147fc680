// The page of one program: every stage of it, linked. No library, no network. `DATA` is what strata wrote.

const $ = (id) => document.getElementById(id);
const make = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (name === "on") Object.assign(made, value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
};
const count = (n) => n === null || n === undefined ? "?" : n.toLocaleString("en-US");
const counted = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;
const bytes = (n) => {
  if (n === null || n === undefined) return "?";
  for (const unit of ["B", "kB", "MB"]) { if (n < 1000) return `${unit === "B" ? n : n.toFixed(1)} ${unit}`; n /= 1000; }
  return `${n.toFixed(1)} GB`;
};
const time = (us) => us < 1000 ? `${us.toFixed(1)} µs` : us < 1e6 ? `${(us / 1000).toFixed(2)} ms` : `${(us / 1e6).toFixed(2)} s`;

async function unpacked() {
  const packed = Uint8Array.from(atob($("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// ------------------------------------------------------------------------------------------------------------- the data

let DATA, text, nodes, stages, steps, stepOf, users, bufferAt;

function prepare(data) {
  DATA = data;
  text = (i) => i < 0 ? "" : DATA.texts[i];
  nodes = (data.nodes || []).map(([op, fields, inputs, types, line, block, pass], id) => ({
    id, op: text(op), fields: text(fields), inputs, types: types.map(text), line: text(line), block: text(block), pass: text(pass),
  }));
  stages = data.stages || [];
  steps = (data.steps || []).map((s, at) => ({ ...s, at }));
  stepOf = new Map();
  for (const step of steps) for (const id of step.nodes) if (!stepOf.has(id)) stepOf.set(id, step.at);
  bufferAt = new Map((data.buffers || []).map((b) => [b.name, b]));
  users = new Map();
  for (const step of steps) for (const name of step.inputs) users.set(name, [...(users.get(name) || []), step.at]);
}

const isLeaf = (node) => node.op === "input" || node.op === "param" || node.op === "constant";
const called = (node) => isLeaf(node) && node.fields ? node.fields : node.op;
const stageNamed = (name) => stages.findIndex((s) => s.name === name);

// --------------------------------------------------------------------------------------------------------------- drawing

// Nodes that are computed from inputs: the rest is weights, constants and what is made of them.
function fedNodes(ids) {
  const fed = new Set();
  for (const id of ids) if (nodes[id].op === "input" || nodes[id].inputs.some(([from]) => fed.has(from))) fed.add(id);
  return fed;
}

// What a pane draws: boxes {key, title, sub, kind, members} and edges between their keys.
function graphOf(stageAt, fold, opened, weights) {
  const stage = stages[stageAt], home = new Map(), boxes = new Map(), fed = fedNodes(stage.nodes);
  const shown = weights || !fed.size ? stage.nodes : stage.nodes.filter((id) => fed.has(id));
  for (const id of shown) {
    const node = nodes[id];
    let group = null;
    if (!isLeaf(node)) {
      if (fold === "block") group = node.block || null;
      else if (fold === "line") group = node.line || null;
      else if (fold === "kernel" && stepOf.has(id)) group = `${steps[stepOf.get(id)].name} ${stepOf.get(id)}`;
    }
    const key = group === null || opened.has(group) ? `n${id}` : `g${group}`;
    home.set(id, key);
    if (!boxes.has(key)) boxes.set(key, { key, group: key[0] === "g" ? group : null, members: [], inputs: new Set() });
    boxes.get(key).members.push(id);
  }
  const edges = [];
  for (const id of shown)
    for (const [from] of nodes[id].inputs) {
      const a = home.get(from), b = home.get(id);
      if (a === undefined || a === b || boxes.get(b).inputs.has(a)) continue;
      boxes.get(b).inputs.add(a);
      edges.push([a, b]);
    }
  const fresh = new Set(stage.new || []), results = new Set(stage.results);
  for (const box of boxes.values()) {
    const first = nodes[box.members[0]], last = nodes[box.members[box.members.length - 1]];
    const several = box.members.length > 1;
    box.title = box.group !== null ? (fold === "kernel" ? labelOf(box) : box.group) : called(first);
    const ops = box.group !== null && fold === "kernel" ? steps[stepOf.get(box.members[0])].nodes.length : box.members.length;  // of a kernel: weights' ops, too
    box.sub = several || ops > 1 ? `${ops} ops · ${last.types[0]}` : last.types.join(", ");
    box.kind = !several && isLeaf(first) ? first.op : several || ops > 1 ? "group" : "op";
    box.fresh = box.members.some((id) => fresh.has(id));
    box.result = box.members.some((id) => results.has(id));
  }
  return { boxes, edges };
}
const labelOf = (box) => { const step = steps[stepOf.get(box.members[0])]; return step ? step.label : box.group; };

const codeOf = (s) => (DATA.code || {})[s.name] ?? Object.entries(DATA.code || {}).find(([k]) => k.startsWith(`step${s.at} `))?.[1];

function planGraph() {
  const boxes = new Map(), edges = [], maker = new Map();
  for (const step of steps) {
    const key = `s${step.at}`;
    const out = bufferAt.get(step.outputs[0]);
    boxes.set(key, { key, members: step.nodes, step: step.at, title: step.label, sub: `${step.name} · ${out ? out.type : ""}`,
      kind: step.where === "host" && !codeOf(step) ? "host" : step.phase === "prologue" ? "param" : "op", inputs: new Set() });
    const seen = new Set();
    for (const name of step.inputs) {
      let from = maker.get(name);
      if (from === undefined) {
        const buffer = bufferAt.get(name);
        if (!buffer || buffer.role !== "input") continue;  // weights would hide the flow of data
        from = `b${name}`;
        boxes.set(from, { key: from, members: [], buffer: name, title: String(buffer.key ?? name), sub: buffer.type, kind: "input", inputs: new Set() });
        maker.set(name, from);
      }
      if (from !== key && !seen.has(from)) { seen.add(from); boxes.get(key).inputs.add(from); edges.push([from, key]); }
    }
    for (const name of step.outputs) maker.set(name, key);
  }
  return { boxes, edges };
}

function textRows(stageAt) {
  const stage = stages[stageAt], names = new Map(); let next = 0;
  for (const id of stage.nodes) names.set(id, isLeaf(nodes[id]) && nodes[id].op !== "constant" ? called(nodes[id]) : `%${next++}`);
  const fresh = new Set(stage.new || []), rows = [];
  for (const id of stage.gone || []) rows.push({ id, kind: "gone", text: `- ${nodes[id].op}${nodes[id].fields ? ` {${nodes[id].fields}}` : ""} : ${nodes[id].types.join(", ")}` });
  for (const id of stage.nodes) {
    const n = nodes[id], inputs = n.inputs.map(([i, k]) => (names.get(i) ?? "?") + (k ? `.${k}` : "")).join(", ");
    const said = isLeaf(n) && n.op !== "constant" ? `${n.op} ${called(n)}` : `${names.get(id)} = ${n.op}(${inputs})${n.fields ? ` {${n.fields}}` : ""}`;
    rows.push({ id, kind: fresh.has(id) ? "new" : "", text: `${fresh.has(id) ? "+" : " "} ${said} : ${n.types.join(", ")}` });
  }
  return rows;
}

// --------------------------------------------------------------------------------------------------------------- the page

const state = { tab: "", left: 0, right: null, fold: "none", form: "graph", weights: true, opened: new Set(), chosen: null, views: [] };

function select(chosen, jump = true) { state.chosen = chosen; details(); if (jump) light(); markLeft(); }
const chooseNode = (id) => select({ node: id });
const chooseStep = (at) => select({ step: at });
const chooseBuffer = (name) => select({ buffer: name });

// Nodes that belong to what is chosen: itself, or those of its kernel, its line, its buffer.
function chosenNodes() {
  const c = state.chosen || {};
  if (c.step !== undefined) return steps[c.step].nodes;
  if (c.node !== undefined) return c.members || [c.node];
  if (c.line !== undefined) return nodes.filter((n) => n.line === c.line).map((n) => n.id);
  const writer = c.buffer === undefined ? undefined : steps.find((s) => s.outputs.includes(c.buffer));
  return writer ? writer.nodes : [];
}
function byLine(ids) {
  const lines = new Set(ids.map((id) => nodes[id].line).filter(Boolean)), ops = nodes.filter((n) => !isLeaf(n)), found = ops.filter((n) => lines.has(n.line));
  return lines.size < 9 && found.length <= ops.length / 2 ? found.map((n) => n.id) : [];  // a line that loads a model says nothing
}
// Nodes of another stage that do the same work: they come from the same lines of the program, or read the same weights.
function alike(rows, ids) {
  const lines = new Set(byLine(ids)), weights = new Set(ids.flatMap((id) => nodes[id].inputs.map(([from]) => from)).filter((id) => nodes[id].op === "param"));
  return rows.filter((id) => lines.has(id) || nodes[id].inputs.some(([from]) => weights.has(from)));
}
function light() {
  const ids = chosenNodes();
  for (const v of state.views)
    if (v.plan) v.show(planKeys(v));
    else if (v instanceof Drawing) { const keys = readersIn(v, ids); v.show(keys.length ? keys : v.keysOf(alike(stages[v.stage].nodes, ids))); }
    else if (v instanceof Lines) v.show(v.rows.some((r) => ids.includes(r.id)) ? ids : alike(v.rows.map((r) => r.id), ids));
    else v.show();
}
// Boxes of these nodes, or, where weights are not drawn, of what reads them.
function readersIn(v, ids) {
  let now = new Set(ids), keys = v.keysOf(ids);
  while (!keys.length && now.size) {
    now = new Set(stages[v.stage].nodes.filter((id) => nodes[id].inputs.some(([from]) => now.has(from))));
    keys = v.keysOf(now);
  }
  return keys;
}
function planKeys(v) {
  const c = state.chosen || {}, ids = new Set(chosenNodes());
  if (c.step !== undefined) return [`s${c.step}`];
  if (c.buffer !== undefined) return v.list.filter((b) => b.buffer === c.buffer || (b.step !== undefined && [...steps[b.step].inputs, ...steps[b.step].outputs].includes(c.buffer))).map((b) => b.key);
  return v.list.filter((b) => b.members.some((id) => ids.has(id))).map((b) => b.key);
}

function pane(title) { const made = make("div", { class: "pane" }, title ? make("span", { class: "name" }, title) : null); $("panes").append(made); return made; }

function stagePane(at, title) {
  const where = pane(title);
  if (state.form === "text") { const made = new Lines(where, textRows(at), chooseNode); state.views.push(made); made.paint(); return; }
  const choose = (box) => select(box.members.length === 1 ? { node: box.members[0] } : stepChoice(box));
  const made = new Drawing(where, graphOf(at, state.fold, state.opened, state.weights), choose, (group) => { state.opened.add(group); render(); });
  made.stage = at; state.views.push(made);
}
const stepChoice = (box) => state.fold === "kernel" && stepOf.has(box.members[0]) ? { step: stepOf.get(box.members[0]) } : { node: box.members[box.members.length - 1], members: box.members };

const TABS = {
  Stages: { has: () => stages.length, left: stageList, tools: stageTools, middle() {
    stagePane(state.left, state.right !== null ? stages[state.left].name : "");
    if (state.right === null) return;
    stagePane(state.right, stages[state.right].name);
    for (const v of state.views) if (v instanceof Drawing) { v.measure(); v.begin(); }  // the first had the width of both
  } },
  Plan: { has: () => steps.length, left: stepList, tools: () => planTools(), middle() {
    const made = new Drawing(pane(), planGraph(), (box) => box.step !== undefined ? chooseStep(box.step) : chooseBuffer(box.buffer), () => {});
    made.plan = true; state.views.push(made);
  } },
  Memory: { has: () => (DATA.buffers || []).length, left: bufferList, tools: memoryTools, middle: memoryPane },
  Fusion: { has: () => steps.length, left: stepList, tools: () => [], middle: fusionPane },
  Weights: { has: () => (DATA.tensors || []).length || params().length, left: () => [], tools: () => [], middle: weightsPane },
  File: { has: () => (DATA.facts || []).length || DATA.problem, left: () => [], tools: () => [], middle: factsPane },
  Timeline: { has: () => (DATA.spans || []).length, left: spanList, tools: () => ["Drag to move, wheel to zoom"], middle: timelinePane },
};
const params = () => (DATA.buffers || []).filter((b) => b.role === "param");

function stageList() {
  return [make("h3", {}, "Stages"), ...stages.map((s, i) => make("div", { class: `item ${i === state.left ? "on" : ""}`, on: { onclick: () => { state.left = i; render(); } } },
    s.name, make("small", {}, s.note), s.new && s.new.length + s.gone.length ? make("small", {}, `+${s.new.length} −${s.gone.length}`) : null))];
}
function stageTools() {
  const pick = (label, values, value, change) => make("label", {}, `${label} `, make("select", { on: { onchange: (e) => { change(e.target.value); render(); } } },
    ...values.map(([v, t]) => make("option", { value: v, ...(String(v) === String(value) ? { selected: "" } : {}) }, t))));
  return [
    pick("Show as", [["graph", "graph"], ["text", "text"]], state.form, (v) => { state.form = v; }),
    pick("Fold by", [["none", "nothing"], ["block", "block"], ["line", "line"], ["kernel", "kernel"]], state.fold, (v) => { state.fold = v; state.opened.clear(); }),
    pick("Compare with", [["", "nothing"], ...stages.map((s, i) => [i, s.name])], state.right ?? "", (v) => { state.right = v === "" ? null : Number(v); }),
    state.form === "graph" ? make("label", { title: "Weights, constants and what is computed from them alone" }, make("input", { type: "checkbox", ...(state.weights ? { checked: "" } : {}), on: { onchange: (e) => { state.weights = e.target.checked; render(); } } }), " weights") : null,
    state.form === "graph" ? whole() : null,
    make("span", {}, `${count(stages[state.left].nodes.length)} nodes`),
  ];
}
const whole = () => make("button", { class: "framed", title: "The whole graph", on: { onclick: () => { for (const v of state.views) if (v instanceof Drawing) v.fit(); } } }, "Fit");
const planTools = () => [whole(), make("span", {}, `${steps.filter((s) => s.phase !== "prologue").length} steps a run` + (steps.some((s) => s.phase === "prologue") ? `, ${steps.filter((s) => s.phase === "prologue").length} once, when parameters are set` : ""))];
function stepList() {
  return [make("h3", {}, "Steps"), ...steps.map((s) => make("div", { class: "item", "data-step": s.at, on: { onclick: () => chooseStep(s.at) } },
    `${s.at} ${s.label}`, make("small", {}, `${s.name}${s.where === "host" ? " · one op" : ""}${s.phase === "prologue" ? " · once" : ""}`)))];
}
function bufferList() {
  const list = DATA.buffers.filter((b) => b.role === "scratch").sort((a, b) => (b.bytes || 0) - (a.bytes || 0)).slice(0, 400);
  return [make("h3", {}, "Largest buffers"), ...list.map((b) => make("div", { class: "item", "data-buffer": b.name, on: { onclick: () => chooseBuffer(b.name) } }, b.name, make("small", {}, `${bytes(b.bytes)} · ${b.type}`)))];
}
function markLeft() {
  for (const item of document.querySelectorAll("#left .item[data-step]")) item.classList.toggle("on", state.chosen?.step === Number(item.dataset.step));
  for (const item of document.querySelectorAll("#left .item[data-buffer]")) item.classList.toggle("on", state.chosen?.buffer === item.dataset.buffer);
}

// memory over time: steps from left to right, offsets upwards

function memoryTools() {
  const sizes = Object.entries(DATA.sizes || {}).map(([k, v]) => `${k} = ${v}`).join(", ");
  const known = (role) => DATA.buffers.filter((b) => b.role === role).reduce((a, b) => a + (b.bytes || 0), 0);
  return [make("span", {}, DATA.arena ? `intermediate values ${bytes(DATA.arena.size)}, ${DATA.arena.size > DATA.arena.bound ? `at least ${bytes(DATA.arena.bound)} are needed` : "the least possible"}; ${bytes(DATA.arena.apart)} without reuse` : "sizes come from the data"),
    make("span", {}, `parameters ${bytes(known("param"))}`), sizes ? make("span", {}, `at ${sizes}`) : null];
}
function memoryPane() {
  const where = pane(), canvas = make("canvas"); where.append(canvas);
  const list = DATA.buffers.filter((b) => b.role === "scratch" && b.offset !== null && b.offset !== undefined && b.bytes);
  const area = (b, w, h) => { const n = Math.max(1, steps.length), top = Math.max(1, DATA.arena.size); return [50 + b.birth / n * (w - 70), h - 30 - (b.offset + b.bytes) / top * (h - 60), Math.max(1, (b.death - b.birth + 1) / n * (w - 70)), Math.max(1, b.bytes / top * (h - 60))]; };
  const view = { show() { this.paint(); }, paint() {
    const { c, wide, high } = sized(canvas), colours = theme.read();
    c.font = "11px system-ui"; c.fillStyle = colours.dim;
    if (!DATA.arena) { c.fillText("The sizes are not known before a run.", 60, 40); return; }
    c.fillText(bytes(DATA.arena.size), 4, 26); c.fillText("0", 34, high - 28); c.fillText("step 0", 50, high - 12); c.fillText(`step ${steps.length - 1}`, wide - 70, high - 12);
    c.strokeStyle = colours.bg;
    list.forEach((b, i) => { const place = area(b, wide, high); c.fillStyle = state.chosen?.buffer === b.name ? colours.accent : `hsl(${i * 47 % 360} 42% 60%)`; c.fillRect(...place); c.strokeRect(...place); });
  } };
  const at = (e) => { const r = canvas.getBoundingClientRect(), px = e.clientX - r.left, py = e.clientY - r.top; return list.find((b) => { const [x, y, w, h] = area(b, r.width, r.height); return px >= x && px <= x + w && py >= y && py <= y + h; }); };
  canvas.style.cursor = "pointer";
  canvas.onclick = (e) => { const b = at(e); if (b) chooseBuffer(b.name); };
  hover(canvas, (e) => { const b = at(e); return b && `${b.name} : ${b.type}, ${bytes(b.bytes)}, steps ${b.birth} … ${b.death}`; });
  new ResizeObserver(() => view.paint()).observe(where); state.views.push(view); view.paint();
}

// A line of text at the pointer.
function hover(canvas, said) {
  canvas.addEventListener("pointermove", (e) => { const text = said(e), tip = $("tip"); tip.textContent = text || ""; tip.hidden = !text; tip.style.left = `${Math.min(e.clientX + 14, innerWidth - 380)}px`; tip.style.top = `${e.clientY + 16}px`; });
  canvas.addEventListener("pointerleave", () => { $("tip").hidden = true; });
}

// Rows under heads, or without; numbers, whose heads begin with >, stand at the right.
function tableOf(heads, rows) {
  return make("table", {}, heads.length ? make("tr", {}, ...heads.map((h) => make("th", { class: h[0] === ">" ? "r" : "" }, h.replace(">", "")))) : null,
    ...rows.map((row) => make("tr", {}, ...row.map((cell, k) => make("td", { class: heads[k]?.[0] === ">" ? "r" : "" }, cell instanceof Node ? cell : String(cell ?? ""))))));
}
function fusionPane() {
  const where = pane(), link = (id) => make("a", { on: { onclick: () => chooseNode(id) } }, nodes[id].op);
  const grouped = (list, key) => { const found = new Map(); for (const one of list) { const k = key(one); if (!found.has(k)) found.set(k, []); found.get(k).push(one); } return [...found.values()]; };
  const fused = grouped(steps.filter((s) => s.nodes.length > 1), (s) => `${s.name} ${s.label}`);
  const cuts = grouped(DATA.cuts, ([a, b, why]) => `${nodes[a].op} ${b === null ? "" : nodes[b].op} ${why}`);
  const several = (list, go) => make("span", {}, ...list.slice(0, 12).flatMap((one, i) => [i ? " " : "", go(one)]), list.length > 12 ? ` and ${list.length - 12} more` : "");
  where.append(make("div", { class: "padded" },
    make("h3", {}, `Fused: ${count(fused.reduce((sum, [s, ...more]) => sum + s.nodes.length * (1 + more.length), 0))} ops in ${count(fused.length)} kernels`),
    tableOf(["kernel", "ops", ">count", "steps"], fused.map((list) => [list[0].name, list[0].label, list[0].nodes.length, several(list, (s) => make("a", { on: { onclick: () => chooseStep(s.at) } }, String(s.at)))])),
    make("h3", {}, `Not fused: ${count(DATA.cuts.length)} values go through memory, and why`),
    tableOf(["value of", "read by", "why", ">times", "line"], cuts.map((list) => [link(list[0][0]), list[0][1] === null ? "" : link(list[0][1]), list[0][2], list.length, nodes[list[0][0]].line]))));
}
function weightsPane() {
  const rows = (DATA.tensors || []).length ? DATA.tensors.map(([n, k, s, b]) => [n, k, `[${s.join(", ")}]`, b === null ? "" : bytes(b)]) : params().map((b) => [b.key, b.type.split("[")[0], `[${b.type.split("[")[1] || "]"}`, bytes(b.bytes)]);
  pane().append(make("div", { class: "padded" }, tableOf(["name", "format", "shape", ">size"], rows.slice(0, 20000))));
}
function factsPane() {
  pane().append(make("div", { class: "padded" }, DATA.problem ? make("p", { class: "problem" }, `The program is not shown: ${DATA.problem}`) : null, tableOf([], DATA.facts || [])));
}

// the timeline of a trace

function spanList() {
  const total = new Map();
  for (const [name, , , dur] of DATA.spans) { const t = total.get(name) || [0, 0]; t[0] += dur; t[1]++; total.set(name, t); }
  return [make("h3", {}, "Time by name"), ...[...total].sort((a, b) => b[1][0] - a[1][0]).slice(0, 300).map(([name, [t, n]]) => make("div", { class: "item", on: { onclick: () => select({ span: DATA.spans.find((s) => s[0] === name) }) } }, name, make("small", {}, `${time(t)}${n > 1 ? `, ${count(n)} times` : ""}`)))];
}
function hueOf(name) { let hash = 0; for (const ch of name) hash = (hash * 31 + ch.charCodeAt(0)) % 360; return `hsl(${hash} 45% 62%)`; }
function timelinePane() {
  const where = pane(), canvas = make("canvas"); where.append(canvas);
  const threads = [...new Set(DATA.spans.map((s) => s[4]))], rows = []; let base = 24;
  const top = new Map();
  for (const t of threads) {
    const own = DATA.spans.filter((s) => s[4] === t).sort((a, b) => a[2] - b[2] || b[3] - a[3]), open = []; let deepest = 0;
    for (const s of own) { while (open.length && open[open.length - 1] <= s[2] + 1e-9) open.pop(); rows.push([s, base + open.length * 20, hueOf(s[0])]); deepest = Math.max(deepest, open.length); open.push(s[2] + s[3]); }
    top.set(t, base); base += (deepest + 1) * 20 + 26;
  }
  const begin = DATA.spans.reduce((least, s) => Math.min(least, s[2]), Infinity), end = DATA.spans.reduce((most, s) => Math.max(most, s[2] + s[3]), -Infinity);
  let from = begin, span = Math.max(1e-3, end - begin), dy = 0;
  const view = { show() { this.draw(); }, draw() { if (!this.asked) { this.asked = true; requestAnimationFrame(() => { this.asked = false; this.paint(); }); } }, paint() {
    const { c, wide, high } = sized(canvas), colours = theme.read(), x = (t) => (t - from) / span * wide;
    c.font = "11px system-ui";
    for (const [span_, y, hue] of rows) {
      const a = x(span_[2]), w = Math.max(0.5, span_[3] / span * wide);
      if (a + w < 0 || a > wide || y + dy < -20 || y + dy > high) continue;
      c.fillStyle = state.chosen?.span === span_ ? colours.accent : hue; c.fillRect(a, y + dy, w, 18);
      if (w > 40) { c.fillStyle = "#111"; c.save(); c.beginPath(); c.rect(a, y + dy, w, 18); c.clip(); c.fillText(span_[0], Math.max(a, 0) + 4, y + dy + 13); c.restore(); }
    }
    c.fillStyle = colours.dim;
    for (const [t, y] of top) c.fillText(DATA.threads[t] ? `${DATA.threads[t]}` : `thread ${t}`, 6, y + dy - 5);
    c.fillText(`${time(from - begin)} … ${time(from - begin + span)}`, wide - 170, 14);
  } };
  canvas.onwheel = (e) => { e.preventDefault(); const r = canvas.getBoundingClientRect(), at = from + (e.clientX - r.left) / r.width * span, f = Math.exp(e.deltaY * 0.0015); span = Math.min((end - begin) * 1.2, Math.max(1e-3, span * f)); from = at - (e.clientX - r.left) / r.width * span; view.draw(); };
  let held = null, moved = false;
  canvas.onpointerdown = (e) => { held = [e.clientX, e.clientY]; moved = false; canvas.setPointerCapture(e.pointerId); };
  canvas.onpointermove = (e) => { if (!held) return; const r = canvas.getBoundingClientRect(); from -= (e.clientX - held[0]) / r.width * span; dy = Math.min(0, dy + e.clientY - held[1]); if (Math.abs(e.clientX - held[0]) + Math.abs(e.clientY - held[1]) > 1) moved = true; held = [e.clientX, e.clientY]; view.draw(); };
  const at = (e) => { const r = canvas.getBoundingClientRect(), t = from + (e.clientX - r.left) / r.width * span, y = e.clientY - r.top - dy; return rows.find(([s, above]) => t >= s[2] && t <= s[2] + s[3] && y >= above && y <= above + 18)?.[0]; };
  canvas.onpointerup = (e) => { held = null; const hit = moved ? undefined : at(e); if (hit) select({ span: hit }); };
  hover(canvas, (e) => { const s = held ? undefined : at(e); return s && `${s[0]}: ${time(s[3])}`; });
  new ResizeObserver(() => view.paint()).observe(where); state.views.push(view); view.paint();
}

// ------------------------------------------------------------------------------------------------- details on the right

function details() {
  const right = $("right"), c = state.chosen;
  right.replaceChildren(...(!c ? hello() : c.node !== undefined ? ofNode(nodes[c.node], c.members) : c.step !== undefined ? ofStep(steps[c.step]) : c.buffer !== undefined ? ofBuffer(bufferAt.get(c.buffer)) : c.span ? ofSpan(c.span) : ofLine(c.line)).filter(Boolean));
}
// Nothing is chosen: the program in a few numbers, what the colours mean, and what to do.
function hello() {
  const hint = make("p", { class: "dim" }, stages.length ? "Click a box to see its types, its kernel, its buffers, its code and the line it came from. Double-click a folded group to open it. Drag to move, turn the wheel to zoom, press / to search." : "Click a span to see what it was.");
  if (!stages.length) return [hint];
  const last = stages[stages.length - 1], ins = last.nodes.map((id) => nodes[id]).filter((n) => n.op === "input"), outs = last.results.map((id) => nodes[id]);
  const fused = steps.filter((s) => s.nodes.length > 1), weights = params().reduce((sum, b) => sum + (b.bytes || 0), 0);
  const names = { input: "input", param: "weight, or made of weights", constant: "constant", op: "op", group: "several ops in one box", host: "op with a routine of its own" };
  const rows = [steps.length ? ["kernels", `${count(new Set(steps.map((s) => s.name)).size)}, in ${counted(steps.length, "step")}`] : null, fused.length ? ["fused", `${count(fused.reduce((a, s) => a + s.nodes.length, 0))} ops in ${counted(fused.length, "step")}`] : null,
    params().length ? ["parameters", `${count(params().length)}, ${bytes(weights)}`] : null, DATA.arena ? ["intermediate values", bytes(DATA.arena.size)] : null].filter(Boolean);
  const kinds = new Set(state.views.flatMap((v) => v instanceof Drawing ? v.list.map((b) => b.kind) : []));
  const legend = Object.entries(names).filter(([kind]) => kinds.has(kind)).map(([kind, name]) => { const dot = make("i", { class: "dot" }); dot.style.background = BAND[kind]; return make("div", {}, dot, name); });
  return [make("h2", {}, DATA.name), DATA.problem ? make("p", { class: "problem" }, `The program is not shown: ${DATA.problem}`) : null, ...(rows.length ? [tableOf([], rows)] : []), legend.length ? hint : null, ...(legend.length ? [make("h3", {}, "Colours"), ...legend] : []),
    ...listed("Inputs", ins.map((n) => nodeLink(n.id)), 12), ...listed("Results", outs.map((n) => nodeLink(n.id)), 12)];
}
const nodeLink = (id) => make("a", { on: { onclick: () => chooseNode(id) } }, `${called(nodes[id])} : ${nodes[id].types[0]}`);
const stepLink = (at) => make("a", { on: { onclick: () => { chooseStep(at); } } }, `${steps[at].name}: ${steps[at].label}`);
const lineLinks = (lines) => lines.length ? [make("h3", {}, lines.length > 1 ? "Lines" : "Line"), ...lines.flatMap(oneLine)] : [];
const oneLine = (line) => [make("div", {}, make("a", { on: { onclick: () => select({ line }) } }, line)), DATA.lines[line] ? make("pre", {}, DATA.lines[line]) : null];
const listed = (title, items, most = 60) => items.length ? [make("h3", {}, title), ...items.slice(0, most).map((i) => make("div", {}, i)), items.length > most ? make("div", { class: "dim" }, `and ${items.length - most} more`) : null] : [];

function ofNode(n, members) {
  const readers = stages[state.left] ? stages[state.left].nodes.filter((id) => nodes[id].inputs.some(([i]) => i === n.id)) : [];
  const cuts = (DATA.cuts || []).filter(([a, b]) => a === n.id || b === n.id);
  return [make("h2", {}, members ? `${members.length} ops, the last: ${called(n)}` : called(n)), make("div", {}, n.types.join(", ")), n.fields && !isLeaf(n) ? make("pre", {}, n.fields.replaceAll(", ", ",\n")) : null,
    ...listed("Ops", (members || []).map(nodeLink)),
    ...listed("Inputs", n.inputs.map(([i]) => nodeLink(i))), ...listed("Read by", readers.map(nodeLink)),
    ...(stepOf.has(n.id) ? [make("h3", {}, "Runs in"), stepLink(stepOf.get(n.id))] : []),
    ...listed("Not fused", cuts.map(([a, b, why]) => make("span", {}, `${nodes[a].op}${b === null ? "" : ` → ${nodes[b].op}`}: ${why}`))),
    ...(n.block ? [make("h3", {}, "Block"), n.block] : []), ...(n.pass ? [make("h3", {}, "Made by pass"), n.pass] : []), ...lineLinks(n.line ? [n.line] : [])];
}
function ofStep(s) {
  const code = codeOf(s);
  const kernel = (DATA.kernels || {})[s.name], lines = [...new Set(s.nodes.map((id) => nodes[id].line).filter(Boolean))];
  const cuts = (DATA.cuts || []).filter(([a, b]) => s.nodes.includes(a) || s.nodes.includes(b));
  const fold = (title, body, open) => body ? make("details", open ? { open: "" } : {}, make("summary", {}, title), make("pre", {}, body)) : null;
  const buffer = (name) => make("a", { on: { onclick: () => chooseBuffer(name) } }, `${name} : ${bufferAt.get(name)?.type ?? ""}`);
  return [make("h2", {}, `${s.name}: ${s.label}`), make("div", { class: "dim" }, `step ${s.at}${s.phase === "prologue" ? ", once, when parameters are set" : ""}${s.where === "host" ? ", one op with its own routine" : ""}`),
    ...listed("Reads", s.inputs.map(buffer)), ...listed("Writes", s.outputs.map(buffer)), ...listed("Ops", s.nodes.map(nodeLink)),
    ...listed("Why it ends here", cuts.map(([a, b, why]) => make("span", {}, `${nodes[a].op}${b === null ? "" : ` → ${nodes[b].op}`}: ${why}`))),
    make("h3", {}, "Text"), fold("kernel", kernel, true), fold("generated code", code, false), !kernel && !code ? make("div", { class: "dim" }, "a library routine") : null,
    ...lineLinks(lines.filter(Boolean).slice(0, 6))];
}
function ofBuffer(b) {
  const writer = steps.find((s) => s.outputs.includes(b.name)), readers = users.get(b.name) || [];
  return [make("h2", {}, b.name), make("div", {}, `${b.role}${b.key !== null && b.key !== undefined ? ` ${b.key}` : ""} : ${b.type}`), make("div", {}, bytes(b.bytes)),
    b.offset !== null && b.offset !== undefined ? make("div", {}, `offset ${count(b.offset)}, alive in steps ${b.birth} … ${b.death}`) : null,
    ...(writer ? [make("h3", {}, "Written by"), stepLink(writer.at)] : []), ...listed("Read by", readers.map(stepLink))];
}
const ofSpan = ([name, category, begin, dur, thread, args]) => [make("h2", {}, name), make("div", {}, `${category} · ${time(dur)} · thread ${thread}`), make("h3", {}, "Facts"), tableOf([], Object.entries(args || {}).map(([k, v]) => [k, typeof v === "object" ? JSON.stringify(v) : v]))];
function ofLine(line) {
  const ids = nodes.filter((n) => n.line === line && !isLeaf(n)).map((n) => n.id), kernels = [...new Set(ids.filter((id) => stepOf.has(id)).map((id) => stepOf.get(id)))];
  return [make("h2", {}, line), DATA.lines[line] ? make("pre", {}, DATA.lines[line]) : null, ...listed("Kernels", kernels.map(stepLink)), ...listed("Nodes", ids.map(nodeLink))];
}

// ----------------------------------------------------------------------------------------------------------------- search

function search(words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean), left = $("left");
  if (!wanted.length) { renderLeft(); return []; }
  const has = (s) => wanted.every((w) => s.toLowerCase().includes(w)), found = [];
  for (const s of steps) if (has(`${s.name} ${s.label} step ${s.at}`)) found.push(["step", `${s.name}: ${s.label}`, () => { open("Plan"); chooseStep(s.at); }]);
  for (const b of DATA.buffers || []) if (has(`${b.name} ${b.key ?? ""} ${b.type} ${b.role}`)) found.push([b.role, `${b.name}${b.key !== null && b.key !== undefined ? ` (${b.key})` : ""} : ${b.type}`, () => { open("Plan"); chooseBuffer(b.name); }]);
  stages.forEach((stage, at) => { for (const id of stage.nodes) { const n = nodes[id]; if (has(`${n.op} ${n.fields} ${n.types.join(" ")} ${n.block} ${n.line}`)) found.push([stage.name, `${called(n)} : ${n.types[0]}${n.line ? ` · ${n.line}` : ""}`, () => { state.left = at; open("Stages"); chooseNode(id); }]); } });
  for (const [name, kind, shape] of DATA.tensors || []) if (has(`${name} ${kind}`)) found.push(["weight", `${name} ${kind}[${shape.join(", ")}]`, () => open("Weights")]);
  for (const s of DATA.spans || []) { if (found.length > 3000) break; if (has(s[0])) found.push(["span", `${s[0]} ${time(s[3])}`, () => { open("Timeline"); select({ span: s }); }]); }
  left.hidden = false;
  left.replaceChildren(make("h3", {}, `${count(found.length)} found`), ...found.slice(0, 500).map(([kind, said, go]) => make("div", { class: "item", on: { onclick: go } }, said, make("small", {}, kind))));
  return found;
}

// ---------------------------------------------------------------------------------------------------------------- render

function open(tab) { if (state.tab !== tab || tab === "Stages") { state.tab = tab; render(); } }
function renderLeft() { const items = TABS[state.tab].left(); $("left").replaceChildren(...items); $("left").hidden = !items.length; markLeft(); }
function render() {
  state.views = []; $("panes").replaceChildren();
  $("tabs").replaceChildren(...Object.keys(TABS).filter((t) => TABS[t].has()).map((t) => make("button", { class: t === state.tab ? "on" : "", on: { onclick: () => { state.tab = t; render(); } } }, t)));
  $("tools").replaceChildren(...TABS[state.tab].tools().filter(Boolean));
  $("tools").style.display = $("tools").childNodes.length ? "" : "none";
  TABS[state.tab].middle(); if (!$("search").value) renderLeft(); else search($("search").value);
  details(); if (state.chosen) light();
}

// A link such as page.html#tab=Plan&step=3 opens the page there: tab, stage, beside, fold, form, weights, step, node, buffer, search.
function follow(link) {
  const asked = new URLSearchParams(link.replace(/^#/, "")), take = (name, act) => { if (asked.has(name)) act(asked.get(name)); };
  const stage = (name) => Math.max(0, stages.findIndex((s, i) => s.name === name || String(i) === name));
  take("stage", (v) => { state.left = stage(v); });
  take("beside", (v) => { state.right = stage(v); });
  take("fold", (v) => { state.fold = v; });
  take("form", (v) => { state.form = v; });
  take("weights", (v) => { state.weights = v === "yes"; });
  take("tab", (v) => { if (TABS[v] && TABS[v].has()) state.tab = v; });
  render();
  take("step", (v) => { if (steps[v]) chooseStep(Number(v)); });
  take("node", (v) => { if (nodes[v]) chooseNode(Number(v)); });
  take("buffer", (v) => { if (bufferAt.has(v)) chooseBuffer(v); });
  take("search", (v) => { $("search").value = v; search(v); });
}

const KINDS = { onnx: "ONNX", gguf: "GGUF", folder: "model folder" };

async function begin() {
  prepare(await unpacked());
  $("title").textContent = DATA.name;
  $("about").textContent = [KINDS[DATA.kind] ?? DATA.kind, DATA.device ? `on ${DATA.device}` : "", stages.length ? [counted(stages[stages.length - 1].nodes.length, "node"), steps.length ? counted(steps.length, "step") : ""].filter(Boolean).join(", ") : ""].filter(Boolean).join(" · ");
  const dark = localStorage.getItem("strata-theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.classList.toggle("dark", dark === "dark");
  $("theme").onclick = () => { const now = document.documentElement.classList.toggle("dark"); localStorage.setItem("strata-theme", now ? "dark" : "light"); theme.changed(); for (const v of state.views) (v.paint || (() => {})).call(v); };
  let wait = null; $("search").oninput = () => { clearTimeout(wait); wait = setTimeout(() => search($("search").value), 120); };
  document.addEventListener("keydown", (e) => { if (e.key === "/" && e.target.tagName !== "INPUT") { e.preventDefault(); $("search").focus(); } if (e.key === "Escape") { $("search").value = ""; renderLeft(); } });
  if (stages.length > 0) state.left = Math.max(0, stageNamed("optimised"));
  if (stages.length && stages[state.left].nodes.length > 400) state.fold = "kernel";
  state.weights = !stages.length || stages[state.left].nodes.length <= 60;  // more of them hide the flow of data
  state.tab = DATA.kind === "trace" ? "Timeline" : Object.keys(TABS).find((t) => TABS[t].has()) || "File";
  follow(location.hash);
  window.onhashchange = () => follow(location.hash);
  document.documentElement.dataset.ready = "yes";
}
begin().catch((error) => { document.body.textContent = `This page cannot be shown: ${error.message}. It needs a browser of 2023 or newer.`; });
