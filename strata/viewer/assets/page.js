"use strict";
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

// What a pane draws: boxes {key, title, sub, kind, members} and edges between their keys.
function graphOf(stageAt, fold, opened) {
  const stage = stages[stageAt], home = new Map(), boxes = new Map();
  for (const id of stage.nodes) {
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
  for (const id of stage.nodes)
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
    if (box.title.length > 34) box.title = `${box.title.slice(0, 33)}…`;
    box.sub = several ? `${box.members.length} ops · ${last.types[0]}` : last.types.join(", ");
    if (box.sub.length > 38) box.sub = `${box.sub.slice(0, 37)}…`;
    box.kind = !several && isLeaf(first) ? first.op : several ? "group" : "op";
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
    let title = step.label; if (title.length > 34) title = `${title.slice(0, 33)}…`;
    boxes.set(key, { key, members: step.nodes, step: step.at, title, sub: `${step.name} · ${out ? out.type : ""}`.slice(0, 38),
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

const WIDE = 190, HIGH = 40, GAP = 26, ROW = 74;

// Ranks by longest path, leaves next to their first use, order by the mean of neighbours.
function layout({ boxes, edges }) {
  const out = new Map([...boxes.keys()].map((k) => [k, []])), into = new Map([...boxes.keys()].map((k) => [k, []]));
  for (const [a, b] of edges) { out.get(a).push(b); into.get(b).push(a); }
  const rank = new Map(), waiting = new Map([...into].map(([k, v]) => [k, v.length]));
  let ready = [...boxes.keys()].filter((k) => !waiting.get(k));
  for (const k of boxes.keys()) rank.set(k, 0);
  const order = [];
  while (order.length < boxes.size) {
    if (!ready.length) {  // folding can make a cycle: take one of it
      const next = [...boxes.keys()].find((k) => waiting.get(k) > 0 && !order.includes(k));
      if (next === undefined) break;
      waiting.set(next, 0); ready.push(next);
    }
    const k = ready.pop();
    if (boxes.get(k).done) continue;
    boxes.get(k).done = true; order.push(k);
    for (const b of out.get(k)) {
      if (!boxes.get(b).done) rank.set(b, Math.max(rank.get(b), rank.get(k) + 1));
      waiting.set(b, waiting.get(b) - 1);
      if (waiting.get(b) === 0) ready.push(b);
    }
  }
  const fed = new Set();  // what is computed from an input keeps its rank; leaves and what is made of weights go next to their use
  for (const k of order) if (boxes.get(k).kind === "input" || into.get(k).some((a) => fed.has(a))) fed.add(k);
  for (const k of [...order].reverse())
    if ((!fed.has(k) || !into.get(k).length) && out.get(k).length) rank.set(k, Math.max(rank.get(k), Math.min(...out.get(k).map((b) => rank.get(b))) - 1));
  const rows = [];
  for (const k of order) (rows[rank.get(k)] ||= []).push(k);
  const x = new Map();
  for (const row of rows) (row || []).forEach((k, i) => x.set(k, (i - (row.length - 1) / 2) * (WIDE + GAP)));
  const mean = (list) => list.reduce((a, k) => a + x.get(k), 0) / list.length;
  const settle = (row, near) => {
    if (!row) return;
    const wish = new Map(row.map((k) => [k, near.get(k).length ? mean(near.get(k)) : x.get(k)]));
    row.sort((a, b) => wish.get(a) - wish.get(b));
    let edge = -Infinity;
    for (const k of row) { x.set(k, Math.max(wish.get(k), edge)); edge = x.get(k) + WIDE + GAP; }
    const inner = row.filter((k) => into.get(k).length), kept = inner.length ? inner : row;  // leaves make way for what is computed
    const shift = kept.reduce((sum, k) => sum + wish.get(k) - x.get(k), 0) / kept.length;
    for (const k of row) x.set(k, x.get(k) + shift);
  };
  for (let sweep = 0; sweep < 4; sweep++) {
    for (const row of rows) settle(row, into);
    for (let i = rows.length - 1; i >= 0; i--) settle(rows[i], out);
  }
  for (const [k, box] of boxes) {
    box.x = x.get(k) ?? 0; box.y = (rank.get(k) ?? 0) * ROW;
    box.hub = out.get(k).length > 8;  // its lines would hide all others: they are drawn when it is chosen
  }
  return { boxes, edges };
}

class Drawing {
  constructor(pane, made, choose, open) {
    this.graph = layout(made); this.choose = choose; this.open = open;
    this.canvas = make("canvas"); pane.append(this.canvas);
    this.list = [...this.graph.boxes.values()];
    this.zoom = 1; this.dx = 0; this.dy = 0; this.lit = new Set(); this.frames = [];
    this.canvas.onwheel = (e) => {
      e.preventDefault();
      const factor = Math.exp(-e.deltaY * 0.0015), r = this.canvas.getBoundingClientRect();
      const px = e.clientX - r.left, py = e.clientY - r.top, zoom = Math.min(3, Math.max(0.02, this.zoom * factor));
      this.dx = px - (px - this.dx) * zoom / this.zoom; this.dy = py - (py - this.dy) * zoom / this.zoom; this.zoom = zoom; this.draw();
    };
    let held = null, moved = false;
    this.canvas.onpointerdown = (e) => { held = [e.clientX, e.clientY]; moved = false; this.canvas.setPointerCapture(e.pointerId); };
    this.canvas.onpointermove = (e) => {
      if (!held) return;
      const [a, b] = [e.clientX - held[0], e.clientY - held[1]];
      if (Math.abs(a) + Math.abs(b) > 2) moved = true;
      this.dx += a; this.dy += b; held = [e.clientX, e.clientY]; this.draw();
    };
    this.canvas.onpointerup = (e) => { held = null; if (!moved) { const box = this.at(e); if (box) this.choose(box); } };
    this.canvas.ondblclick = (e) => { const box = this.at(e); if (box && box.group !== null && box.group !== undefined) this.open(box.group); };
    new ResizeObserver(() => { this.size(); this.draw(); }).observe(pane);
    this.size(); this.fit();
  }
  size() {
    const r = this.canvas.getBoundingClientRect(), scale = window.devicePixelRatio || 1;
    this.canvas.width = r.width * scale; this.canvas.height = r.height * scale; this.wide = r.width; this.high = r.height; this.scale = scale;
  }
  at(e) {
    const r = this.canvas.getBoundingClientRect(), x = (e.clientX - r.left - this.dx) / this.zoom, y = (e.clientY - r.top - this.dy) / this.zoom;
    return this.list.find((b) => x >= b.x && x <= b.x + WIDE && y >= b.y && y <= b.y + HIGH);
  }
  fit() {
    if (!this.list.length) return;
    const least = Math.min(...this.list.map((b) => b.x)), most = Math.max(...this.list.map((b) => b.x)) + WIDE;
    const deep = Math.max(...this.list.map((b) => b.y)) + HIGH;
    this.zoom = Math.max(0.35, Math.min(1, this.wide / (most - least + 80), Math.max(this.high / (deep + 80), 0.7)));
    const inner = this.list.filter((b) => b.inputs.size), top = (inner.length ? inner : this.list).reduce((a, b) => b.y < a.y ? b : a);
    this.dx = this.wide / 2 - (most - least <= this.wide / this.zoom ? (least + most) / 2 : top.x + WIDE / 2) * this.zoom; this.dy = 40;
    this.draw();
  }
  show(keys) {
    this.lit = new Set(keys);
    const box = this.list.find((b) => this.lit.has(b.key));
    if (box) {
      const x = box.x * this.zoom + this.dx, y = box.y * this.zoom + this.dy;
      if (x < 0 || y < 0 || x > this.wide - WIDE * this.zoom || y > this.high - HIGH * this.zoom) {
        this.dx = this.wide / 2 - (box.x + WIDE / 2) * this.zoom; this.dy = this.high / 2 - box.y * this.zoom;
      }
    }
    this.draw();
  }
  keysOf(ids) { const wanted = new Set(ids); return this.list.filter((b) => b.members.some((id) => wanted.has(id))).map((b) => b.key); }
  draw() { if (!this.asked) { this.asked = true; requestAnimationFrame(() => { this.asked = false; this.paint(); }); } }
  paint() {
    const begin = performance.now(), c = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name);
    const line = color("--line"), box = color("--box"), ink = color("--text"), dim = color("--dim"), accent = color("--accent"), hit = color("--hit"), fresh = color("--new");
    c.setTransform(this.scale, 0, 0, this.scale, 0, 0); c.clearRect(0, 0, this.wide, this.high);
    c.setTransform(this.scale * this.zoom, 0, 0, this.scale * this.zoom, this.scale * this.dx, this.scale * this.dy);
    const left = -this.dx / this.zoom, top = -this.dy / this.zoom, right = left + this.wide / this.zoom, bottom = top + this.high / this.zoom;
    const readable = this.zoom > 0.28;
    c.lineWidth = 1; c.strokeStyle = dim; c.globalAlpha = 0.6; c.beginPath();
    for (const [a, b] of this.graph.edges) {
      const p = this.graph.boxes.get(a), q = this.graph.boxes.get(b), y1 = p.y + HIGH, y2 = q.y;
      if (Math.max(y1, y2) < top || Math.min(y1, y2) > bottom || (p.hub && !this.lit.has(a) && !this.lit.has(b))) continue;
      const x1 = p.x + WIDE / 2, x2 = q.x + WIDE / 2;
      if (Math.max(x1, x2) < left || Math.min(x1, x2) > right) continue;
      c.moveTo(x1, y1); if (!readable) { c.lineTo(x2, y2); continue; }
      const bend = Math.min(60, Math.abs(y2 - y1) / 2); c.bezierCurveTo(x1, y1 + bend, x2, y2 - bend, x2, y2);
    }
    c.stroke(); c.globalAlpha = 1;
    const band = { input: "#3b82c4", param: "#8a63c9", constant: "#8a8f98", op: "#3f8f6b", group: "#c27a2c", host: "#c0504d" };
    const far = new Map(Object.keys(band).map((kind) => [kind, new Path2D()]));
    for (const b of this.list) {
      if (b.x + WIDE < left || b.x > right || b.y + HIGH < top || b.y > bottom) continue;
      if (!readable && !b.fresh && !this.lit.has(b.key)) { far.get(b.kind).rect(b.x, b.y, WIDE, HIGH); continue; }
      c.fillStyle = this.lit.has(b.key) ? hit : box; c.fillRect(b.x, b.y, WIDE, HIGH);
      c.fillStyle = band[b.kind]; c.fillRect(b.x, b.y, 5, HIGH);
      c.strokeStyle = this.lit.has(b.key) ? accent : b.fresh ? fresh : line; c.lineWidth = b.result || b.fresh || this.lit.has(b.key) ? 2 : 1; c.strokeRect(b.x, b.y, WIDE, HIGH);
      if (!readable) continue;
      c.fillStyle = ink; c.font = "12px system-ui, sans-serif"; c.fillText(b.title, b.x + 12, b.y + 16, WIDE - 16);
      c.fillStyle = dim; c.font = "10.5px ui-monospace, monospace"; c.fillText(b.sub, b.x + 12, b.y + 32, WIDE - 16);
    }
    if (!readable) { c.globalAlpha = 0.55; for (const [kind, path] of far) { c.fillStyle = band[kind]; c.fill(path); } c.globalAlpha = 1; }
    this.frames.push(performance.now() - begin); if (this.frames.length > 200) this.frames.shift();
  }
}

// A list of lines of which only those in sight exist.
class Lines {
  constructor(pane, rows, choose) {
    this.rows = rows; this.pane = pane; this.lit = new Set();
    this.body = make("div", { class: "rows" }); this.body.style.height = `${rows.length * 20 + 40}px`; pane.append(this.body);
    this.choose = choose; pane.onscroll = () => this.paint(); new ResizeObserver(() => this.paint()).observe(pane);
  }
  show(ids) {
    this.lit = new Set(ids);
    const at = this.rows.findIndex((r) => this.lit.has(r.id));
    if (at >= 0 && (at * 20 < this.pane.scrollTop || at * 20 > this.pane.scrollTop + this.pane.clientHeight - 40)) this.pane.scrollTop = at * 20 - this.pane.clientHeight / 2;
    this.paint();
  }
  paint() {
    const from = Math.max(0, Math.floor(this.pane.scrollTop / 20) - 5), to = Math.min(this.rows.length, from + Math.ceil(this.pane.clientHeight / 20) + 12);
    this.body.replaceChildren(...this.rows.slice(from, to).map((row, i) => {
      const made = make("div", { class: `${row.kind || ""} ${this.lit.has(row.id) ? "on" : ""}`, on: { onclick: () => this.choose(row.id) } }, row.text);
      made.style.top = `${(from + i) * 20 + 26}px`; return made;
    }));
  }
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

const state = { tab: "", left: 0, right: null, fold: "none", form: "graph", opened: new Set(), chosen: null, views: [] };

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
  const lines = new Set(ids.map((id) => nodes[id].line).filter(Boolean));
  return lines.size && lines.size < 9 ? nodes.filter((n) => lines.has(n.line) && !isLeaf(n)).map((n) => n.id) : [];
}
// A stage that has none of the chosen nodes shows those of the same lines of the program.
function light() {
  const ids = chosenNodes();
  for (const v of state.views)
    if (v.plan) v.show(planKeys(v));
    else if (v instanceof Drawing) { const keys = v.keysOf(ids); v.show(keys.length ? keys : v.keysOf(byLine(ids))); }
    else if (v instanceof Lines) v.show(v.rows.some((r) => ids.includes(r.id)) ? ids : byLine(ids));
    else v.show();
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
  const made = new Drawing(where, graphOf(at, state.fold, state.opened), choose, (group) => { state.opened.add(group); render(); });
  state.views.push(made);
}
const stepChoice = (box) => state.fold === "kernel" && stepOf.has(box.members[0]) ? { step: stepOf.get(box.members[0]) } : { node: box.members[box.members.length - 1], members: box.members };

const TABS = {
  Stages: { has: () => stages.length, left: stageList, tools: stageTools, middle() {
    stagePane(state.left, state.right !== null ? stages[state.left].name : "");
    if (state.right !== null) stagePane(state.right, stages[state.right].name);
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
    pick("As", [["graph", "graph"], ["text", "text"]], state.form, (v) => { state.form = v; }),
    pick("Fold by", [["none", "nothing"], ["block", "block"], ["line", "line"], ["kernel", "kernel"]], state.fold, (v) => { state.fold = v; state.opened.clear(); }),
    pick("Beside", [["", "nothing"], ...stages.map((s, i) => [i, s.name])], state.right ?? "", (v) => { state.right = v === "" ? null : Number(v); }),
    make("span", {}, `${count(stages[state.left].nodes.length)} nodes`),
  ];
}
const planTools = () => [make("span", {}, `${steps.filter((s) => s.phase !== "prologue").length} steps a run` + (steps.some((s) => s.phase === "prologue") ? `, ${steps.filter((s) => s.phase === "prologue").length} once, when parameters are set` : ""))];
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
  return [make("span", {}, DATA.arena ? `arena ${bytes(DATA.arena.size)} (${bytes(DATA.arena.apart)} side by side; no plan below ${bytes(DATA.arena.bound)})` : "sizes come from the data"),
    make("span", {}, `parameters ${bytes(known("param"))}`), sizes ? make("span", {}, `for ${sizes}`) : null];
}
function memoryPane() {
  const where = pane(), canvas = make("canvas"); where.append(canvas);
  const list = DATA.buffers.filter((b) => b.role === "scratch" && b.offset !== null && b.offset !== undefined && b.bytes);
  const area = (b, w, h) => { const n = Math.max(1, steps.length), top = Math.max(1, DATA.arena.size); return [50 + b.birth / n * (w - 70), h - 30 - (b.offset + b.bytes) / top * (h - 60), Math.max(1, (b.death - b.birth + 1) / n * (w - 70)), Math.max(1, b.bytes / top * (h - 60))]; };
  const view = { show() { this.paint(); }, paint() {
    const r = canvas.getBoundingClientRect(), s = window.devicePixelRatio || 1; canvas.width = r.width * s; canvas.height = r.height * s;
    const c = canvas.getContext("2d"); c.scale(s, s); const style = getComputedStyle(document.documentElement);
    c.font = "11px system-ui"; c.fillStyle = style.getPropertyValue("--dim");
    if (!DATA.arena) { c.fillText("The sizes are not known before a run.", 60, 40); return; }
    c.fillText(bytes(DATA.arena.size), 4, 36); c.fillText("0", 34, r.height - 28); c.fillText("step 0", 50, r.height - 12); c.fillText(`step ${steps.length - 1}`, r.width - 70, r.height - 12);
    list.forEach((b, i) => { const [x, y, w, h] = area(b, r.width, r.height); c.fillStyle = state.chosen?.buffer === b.name ? style.getPropertyValue("--accent") : `hsl(${i * 47 % 360} 55% 62%)`; c.fillRect(x, y, w, h); c.strokeStyle = style.getPropertyValue("--bg"); c.strokeRect(x, y, w, h); });
  } };
  canvas.style.cursor = "pointer";
  canvas.onclick = (e) => { const r = canvas.getBoundingClientRect(); for (const b of list) { const [x, y, w, h] = area(b, r.width, r.height), px = e.clientX - r.left, py = e.clientY - r.top; if (px >= x && px <= x + w && py >= y && py <= y + h) { chooseBuffer(b.name); return; } } };
  new ResizeObserver(() => view.paint()).observe(where); state.views.push(view); view.paint();
}

function tableOf(heads, rows, click) {
  return make("table", {}, make("tr", {}, ...heads.map((h) => make("th", { class: h[0] === ">" ? "r" : "" }, h.replace(">", "")))),
    ...rows.map((row, i) => make("tr", { on: click ? { onclick: () => click(i) } : {} }, ...row.map((cell, k) => make("td", { class: heads[k][0] === ">" ? "r" : "" }, cell instanceof Node ? cell : String(cell ?? ""))))));
}
function fusionPane() {
  const where = pane(), link = (id) => make("a", { on: { onclick: () => chooseNode(id) } }, nodes[id].op);
  const fused = steps.filter((s) => s.nodes.length > 1);
  where.append(make("div", { class: "padded" },
    make("h3", {}, `Fused: ${fused.length} kernels of ${fused.reduce((a, s) => a + s.nodes.length, 0)} ops`),
    tableOf(["step", "ops", ">count"], fused.map((s) => [make("a", { on: { onclick: () => chooseStep(s.at) } }, s.name), s.label, s.nodes.length])),
    make("h3", {}, `Not fused: ${DATA.cuts.length} values go through memory, and why`),
    tableOf(["value of", "read by", "why", "line"], DATA.cuts.map(([a, b, why]) => [link(a), b === null ? "" : link(b), why, nodes[a].line]))));
}
function weightsPane() {
  const rows = (DATA.tensors || []).length ? DATA.tensors.map(([n, k, s, b]) => [n, k, `[${s.join(", ")}]`, b === null ? "" : bytes(b)]) : params().map((b) => [b.key, b.type.split("[")[0], `[${b.type.split("[")[1] || "]"}`, bytes(b.bytes)]);
  pane().append(make("div", { class: "padded" }, tableOf(["name", "format", "shape", ">size"], rows.slice(0, 20000))));
}
function factsPane() {
  pane().append(make("div", { class: "padded" }, DATA.problem ? make("p", { class: "problem" }, `The program is not shown: ${DATA.problem}`) : null, tableOf(["", ""], DATA.facts || [])));
}

// the timeline of a trace

function spanList() {
  const total = new Map();
  for (const [name, , , dur] of DATA.spans) { const t = total.get(name) || [0, 0]; t[0] += dur; t[1]++; total.set(name, t); }
  return [make("h3", {}, "Time by name"), ...[...total].sort((a, b) => b[1][0] - a[1][0]).slice(0, 300).map(([name, [t, n]]) => make("div", { class: "item", on: { onclick: () => select({ span: DATA.spans.find((s) => s[0] === name) }) } }, name, make("small", {}, `${time(t)} in ${count(n)}`)))];
}
function timelinePane() {
  const where = pane(), canvas = make("canvas"); where.append(canvas);
  const threads = [...new Set(DATA.spans.map((s) => s[4]))], rows = []; let base = 24;
  const top = new Map();
  for (const t of threads) {
    const own = DATA.spans.filter((s) => s[4] === t).sort((a, b) => a[2] - b[2] || b[3] - a[3]), open = []; let deepest = 0;
    for (const s of own) { while (open.length && open[open.length - 1] <= s[2] + 1e-9) open.pop(); rows.push([s, base + open.length * 20]); deepest = Math.max(deepest, open.length); open.push(s[2] + s[3]); }
    top.set(t, base); base += (deepest + 1) * 20 + 26;
  }
  const begin = Math.min(...DATA.spans.map((s) => s[2])), end = Math.max(...DATA.spans.map((s) => s[2] + s[3]));
  let from = begin, span = Math.max(1e-3, end - begin), dy = 0;
  const view = { frames: [], show() { this.draw(); }, draw() { if (!this.asked) { this.asked = true; requestAnimationFrame(() => { this.asked = false; this.paint(); }); } }, paint() {
    const start = performance.now(), r = canvas.getBoundingClientRect(), s = window.devicePixelRatio || 1; canvas.width = r.width * s; canvas.height = r.height * s;
    const c = canvas.getContext("2d"); c.scale(s, s); c.font = "11px system-ui"; const style = getComputedStyle(document.documentElement);
    const x = (t) => (t - from) / span * r.width;
    for (const [span_, y] of rows) {
      const a = x(span_[2]), w = Math.max(0.5, span_[3] / span * r.width);
      if (a + w < 0 || a > r.width || y + dy < -20 || y + dy > r.height) continue;
      let hash = 0; for (const ch of span_[0]) hash = (hash * 31 + ch.charCodeAt(0)) % 360;
      c.fillStyle = state.chosen?.span === span_ ? style.getPropertyValue("--accent") : `hsl(${hash} 45% 62%)`; c.fillRect(a, y + dy, w, 18);
      if (w > 40) { c.fillStyle = "#111"; c.save(); c.beginPath(); c.rect(a, y + dy, w, 18); c.clip(); c.fillText(span_[0], Math.max(a, 0) + 4, y + dy + 13); c.restore(); }
    }
    c.fillStyle = style.getPropertyValue("--dim");
    for (const [t, y] of top) c.fillText(DATA.threads[t] ? `${DATA.threads[t]}` : `thread ${t}`, 6, y + dy - 5);
    c.fillText(`${time(from - begin)} … ${time(from - begin + span)}`, r.width - 170, 14);
    this.frames.push(performance.now() - start);
  } };
  canvas.onwheel = (e) => { e.preventDefault(); const r = canvas.getBoundingClientRect(), at = from + (e.clientX - r.left) / r.width * span, f = Math.exp(e.deltaY * 0.0015); span = Math.min((end - begin) * 1.2, Math.max(1e-3, span * f)); from = at - (e.clientX - r.left) / r.width * span; view.draw(); };
  let held = null, moved = false;
  canvas.onpointerdown = (e) => { held = [e.clientX, e.clientY]; moved = false; canvas.setPointerCapture(e.pointerId); };
  canvas.onpointermove = (e) => { if (!held) return; const r = canvas.getBoundingClientRect(); from -= (e.clientX - held[0]) / r.width * span; dy = Math.min(0, dy + e.clientY - held[1]); if (Math.abs(e.clientX - held[0]) + Math.abs(e.clientY - held[1]) > 1) moved = true; held = [e.clientX, e.clientY]; view.draw(); };
  canvas.onpointerup = (e) => { held = null; if (moved) return; const r = canvas.getBoundingClientRect(), t = from + (e.clientX - r.left) / r.width * span, y = e.clientY - r.top - dy; const hit = rows.find(([s, top_]) => t >= s[2] && t <= s[2] + s[3] && y >= top_ && y <= top_ + 18); if (hit) select({ span: hit[0] }); };
  new ResizeObserver(() => view.paint()).observe(where); state.views.push(view); view.paint();
}

// ------------------------------------------------------------------------------------------------- details on the right

function details() {
  const right = $("right"), c = state.chosen;
  right.replaceChildren(...(!c ? hello() : c.node !== undefined ? ofNode(nodes[c.node], c.members) : c.step !== undefined ? ofStep(steps[c.step]) : c.buffer !== undefined ? ofBuffer(bufferAt.get(c.buffer)) : c.span ? ofSpan(c.span) : ofLine(c.line)).filter(Boolean));
}
const hello = () => [make("p", { class: "dim" }, stages.length ? "Click a box to see its types, its kernel, its buffers, its code and the line it came from. Double-click a folded group to open it." : "Click a span to see what it was.")];
const nodeLink = (id) => make("a", { on: { onclick: () => chooseNode(id) } }, `${called(nodes[id])} : ${nodes[id].types[0]}`);
const stepLink = (at) => make("a", { on: { onclick: () => { chooseStep(at); } } }, `${steps[at].name}: ${steps[at].label}`);
const lineLink = (line) => line ? [make("h3", {}, "Line"), make("a", { on: { onclick: () => select({ line }) } }, line), DATA.lines[line] ? make("pre", {}, DATA.lines[line]) : null] : [];
const listed = (title, items) => items.length ? [make("h3", {}, title), ...items.slice(0, 60).map((i) => make("div", {}, i)), items.length > 60 ? make("div", { class: "dim" }, `and ${items.length - 60} more`) : null] : [];

function ofNode(n, members) {
  const readers = stages[state.left] ? stages[state.left].nodes.filter((id) => nodes[id].inputs.some(([i]) => i === n.id)) : [];
  const cuts = (DATA.cuts || []).filter(([a, b]) => a === n.id || b === n.id);
  return [make("h2", {}, members ? `${members.length} ops, the last: ${called(n)}` : called(n)), make("div", {}, n.types.join(", ")), n.fields && !isLeaf(n) ? make("pre", {}, n.fields.replaceAll(", ", ",\n")) : null,
    ...listed("Ops", (members || []).map(nodeLink)),
    ...listed("Inputs", n.inputs.map(([i]) => nodeLink(i))), ...listed("Read by", readers.map(nodeLink)),
    ...(stepOf.has(n.id) ? [make("h3", {}, "Runs in"), stepLink(stepOf.get(n.id))] : []),
    ...listed("Not fused", cuts.map(([a, b, why]) => make("span", {}, `${nodes[a].op}${b === null ? "" : ` → ${nodes[b].op}`}: ${why}`))),
    ...(n.block ? [make("h3", {}, "Block"), n.block] : []), ...(n.pass ? [make("h3", {}, "Made by pass"), n.pass] : []), ...lineLink(n.line)];
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
    ...lines.slice(0, 6).flatMap(lineLink)];
}
function ofBuffer(b) {
  const writer = steps.find((s) => s.outputs.includes(b.name)), readers = users.get(b.name) || [];
  return [make("h2", {}, b.name), make("div", {}, `${b.role}${b.key !== null && b.key !== undefined ? ` ${b.key}` : ""} : ${b.type}`), make("div", {}, bytes(b.bytes)),
    b.offset !== null && b.offset !== undefined ? make("div", {}, `offset ${count(b.offset)}, alive in steps ${b.birth} … ${b.death}`) : null,
    ...(writer ? [make("h3", {}, "Written by"), stepLink(writer.at)] : []), ...listed("Read by", readers.map(stepLink))];
}
const ofSpan = ([name, category, begin, dur, thread, args]) => [make("h2", {}, name), make("div", {}, `${category} · ${time(dur)} · thread ${thread}`), make("h3", {}, "Facts"), tableOf(["", ""], Object.entries(args || {}).map(([k, v]) => [k, typeof v === "object" ? JSON.stringify(v) : v]))];
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
  left.replaceChildren(make("h3", {}, `${count(found.length)} found`), ...found.slice(0, 500).map(([kind, said, go]) => make("div", { class: "item", on: { onclick: go } }, said, make("small", {}, kind))));
  return found;
}

// ---------------------------------------------------------------------------------------------------------------- render

function open(tab) { if (state.tab !== tab || tab === "Stages") { state.tab = tab; render(); } }
function renderLeft() { $("left").replaceChildren(...TABS[state.tab].left()); markLeft(); }
function render() {
  state.views = []; $("panes").replaceChildren();
  $("tabs").replaceChildren(...Object.keys(TABS).filter((t) => TABS[t].has()).map((t) => make("button", { class: t === state.tab ? "on" : "", on: { onclick: () => { state.tab = t; render(); } } }, t)));
  $("tools").replaceChildren(...TABS[state.tab].tools().filter(Boolean));
  $("tools").style.display = $("tools").childNodes.length ? "" : "none";
  TABS[state.tab].middle(); if (!$("search").value) renderLeft(); else search($("search").value);
  details(); if (state.chosen) light();
}

// A link such as page.html#tab=Plan&step=3 opens the page there: tab, stage, beside, fold, form, step, node, buffer, search.
function follow(link) {
  const asked = new URLSearchParams(link.replace(/^#/, "")), take = (name, act) => { if (asked.has(name)) act(asked.get(name)); };
  const stage = (name) => Math.max(0, stages.findIndex((s, i) => s.name === name || String(i) === name));
  take("stage", (v) => { state.left = stage(v); });
  take("beside", (v) => { state.right = stage(v); });
  take("fold", (v) => { state.fold = v; });
  take("form", (v) => { state.form = v; });
  take("tab", (v) => { if (TABS[v] && TABS[v].has()) state.tab = v; });
  render();
  take("step", (v) => { if (steps[v]) chooseStep(Number(v)); });
  take("node", (v) => { if (nodes[v]) chooseNode(Number(v)); });
  take("buffer", (v) => { if (bufferAt.has(v)) chooseBuffer(v); });
  take("search", (v) => { $("search").value = v; search(v); });
}

async function begin() {
  prepare(await unpacked());
  $("title").textContent = DATA.name;
  $("about").textContent = [DATA.kind, DATA.device ? `on ${DATA.device} (${DATA.target})` : "", stages.length ? `${count(stages[stages.length - 1].nodes.length)} nodes, ${count(steps.length)} steps` : ""].filter(Boolean).join(" · ");
  const dark = localStorage.getItem("strata-theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.classList.toggle("dark", dark === "dark");
  $("theme").onclick = () => { const now = document.documentElement.classList.toggle("dark"); localStorage.setItem("strata-theme", now ? "dark" : "light"); for (const v of state.views) (v.paint || (() => {})).call(v); };
  let wait = null; $("search").oninput = () => { clearTimeout(wait); wait = setTimeout(() => search($("search").value), 120); };
  document.addEventListener("keydown", (e) => { if (e.key === "/" && e.target.tagName !== "INPUT") { e.preventDefault(); $("search").focus(); } if (e.key === "Escape") { $("search").value = ""; renderLeft(); } });
  if (stages.length > 0) state.left = Math.max(0, stageNamed("optimised"));
  if (stages.length && stages[state.left].nodes.length > 400) state.fold = "kernel";
  state.tab = DATA.kind === "trace" ? "Timeline" : Object.keys(TABS).find((t) => TABS[t].has()) || "File";
  follow(location.hash);
  window.onhashchange = () => follow(location.hash);
  document.documentElement.dataset.ready = "yes";
}
begin().catch((error) => { document.body.textContent = `This page cannot be shown: ${error.message}. It needs a browser of 2023 or newer.`; });
