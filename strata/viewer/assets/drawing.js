"use strict";
// Graphs on a canvas, and long lists of lines. Work follows what is in sight, not the size of the graph.

const WIDE = 220, HIGH = 40, GAP = 26, ROW = 74;

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
    box.next = out.get(k).length > 8 ? out.get(k).reduce((a, b) => rank.get(b) < rank.get(a) ? b : a) : null;  // all lines of a hub would hide the others: one is drawn, all when it is chosen
  }
  return { boxes, edges };
}

const BAND = { input: "#3b82c4", param: "#8a63c9", constant: "#8a8f98", op: "#3f8f6b", group: "#c27a2c", host: "#c0504d" };
const TITLE = "12px system-ui, sans-serif", SUB = "10.5px ui-monospace, monospace";
const LEGIBLE = 0.45;  // below this zoom letters would be smaller than 6 pixels: boxes are drawn without them
const FAR = 4 * ROW;  // longer lines are fainter, so that those between neighbours are seen

// Text that fits into a width; it is measured once, not in every frame.
const ruler = document.createElement("canvas").getContext("2d");
function fitted(text, font, wide) {
  ruler.font = font;
  if (ruler.measureText(text).width <= wide) return text;
  let low = 0, high = text.length;
  while (low < high) { const mid = (low + high + 1) >> 1; if (ruler.measureText(`${text.slice(0, mid)}…`).width <= wide) low = mid; else high = mid - 1; }
  return `${text.slice(0, low)}…`;
}

// What paints with the colours of the theme reads them here; `changed` follows a switch between dark and light.
const theme = { read() {
  if (!this.known) { const style = getComputedStyle(document.documentElement); this.known = Object.fromEntries(["line", "box", "text", "dim", "accent", "hit", "new", "bg"].map((n) => [n, style.getPropertyValue(`--${n}`)])); }
  return this.known;
}, changed() { this.known = null; } };

// A canvas is as large as its place on the page, in pixels of the screen.
function sized(canvas) {
  const r = canvas.getBoundingClientRect(), scale = window.devicePixelRatio || 1, wide = Math.round(r.width * scale), high = Math.round(r.height * scale);
  if (canvas.width !== wide || canvas.height !== high) { canvas.width = wide; canvas.height = high; }
  const c = canvas.getContext("2d"); c.setTransform(scale, 0, 0, scale, 0, 0); c.clearRect(0, 0, r.width, r.height);
  return { c, wide: r.width, high: r.height, scale };
}

class Drawing {
  constructor(pane, made, choose, open) {
    this.graph = layout(made); this.choose = choose; this.open = open;
    this.canvas = make("canvas"); pane.append(this.canvas);
    this.list = [...this.graph.boxes.values()].sort((a, b) => a.y - b.y);
    this.links = this.graph.edges.map(([a, b]) => { const from = this.graph.boxes.get(a), to = this.graph.boxes.get(b); return { from, to, y: Math.min(from.y, to.y) }; }).sort((a, b) => a.y - b.y);
    this.longest = this.links.reduce((most, { from, to }) => Math.max(most, Math.abs(to.y - from.y)), 0);  // a line that begins further above does not reach down here
    this.zoom = 1; this.dx = 0; this.dy = 0; this.lit = new Set(); this.drawn = { boxes: 0, texts: 0, lines: 0 };
    this.canvas.onwheel = (e) => {
      e.preventDefault();
      const factor = Math.exp(-e.deltaY * 0.0015), r = this.canvas.getBoundingClientRect();
      this.zoomTo(this.zoom * factor, e.clientX - r.left, e.clientY - r.top);
    };
    let held = null, moved = false;
    this.canvas.onpointerdown = (e) => { held = [e.clientX, e.clientY]; moved = false; this.canvas.setPointerCapture(e.pointerId); };
    this.canvas.onpointermove = (e) => {
      if (!held) { this.canvas.style.cursor = this.at(e) ? "pointer" : "grab"; return; }
      const [a, b] = [e.clientX - held[0], e.clientY - held[1]];
      if (Math.abs(a) + Math.abs(b) > 2) moved = true;
      this.dx += a; this.dy += b; held = [e.clientX, e.clientY]; this.draw();
    };
    this.canvas.onpointerup = (e) => { held = null; if (!moved) { const box = this.at(e); if (box) this.choose(box); } };
    this.canvas.ondblclick = (e) => { const box = this.at(e); if (box && box.group !== null && box.group !== undefined) this.open(box.group); };
    new ResizeObserver(() => { this.measure(); this.paint(); }).observe(pane);  // at once: the next frame would show it stretched
    this.measure(); this.begin();
  }
  // What was in the middle stays there when the place changes its width.
  measure() { const r = this.canvas.getBoundingClientRect(); this.dx += (r.width - (this.wide ?? r.width)) / 2; this.wide = r.width; this.high = r.height; }
  at(e) {
    const r = this.canvas.getBoundingClientRect(), x = (e.clientX - r.left - this.dx) / this.zoom, y = (e.clientY - r.top - this.dy) / this.zoom;
    for (let i = this.first(this.list, y - HIGH); i < this.list.length && this.list[i].y <= y; i++) { const b = this.list[i]; if (x >= b.x && x <= b.x + WIDE && y <= b.y + HIGH) return b; }
    return undefined;
  }
  // The first of a sorted list whose top is not above y.
  first(list, y) {
    let low = 0, high = list.length;
    while (low < high) { const mid = (low + high) >> 1; if (list[mid].y < y) low = mid + 1; else high = mid; }
    return low;
  }
  zoomTo(zoom, px, py) {
    zoom = Math.min(3, Math.max(0.02, zoom));
    this.dx = px - (px - this.dx) * zoom / this.zoom; this.dy = py - (py - this.dy) * zoom / this.zoom; this.zoom = zoom; this.draw();
  }
  bounds() {
    const least = this.list.reduce((a, b) => Math.min(a, b.x), Infinity), most = this.list.reduce((a, b) => Math.max(a, b.x), -Infinity) + WIDE;
    return { least, most, deep: this.list[this.list.length - 1].y + HIGH };
  }
  // The first view: where the program begins, large enough to read.
  begin() {
    if (!this.list.length) return;
    const { least, most } = this.bounds();
    this.zoom = Math.max(0.75, Math.min(1, this.wide / (most - least + 80)));
    const inner = this.list.filter((b) => b.inputs.size), top = inner.length ? inner[0] : this.list[0];
    this.dx = this.wide / 2 - (most - least <= this.wide / this.zoom ? (least + most) / 2 : top.x + WIDE / 2) * this.zoom; this.dy = 40;
    this.draw();
  }
  fit() {
    if (!this.list.length) return;
    const { least, most, deep } = this.bounds();
    this.zoom = Math.max(0.02, Math.min(1, this.wide / (most - least + 80), this.high / (deep + 80)));
    this.dx = this.wide / 2 - (least + most) / 2 * this.zoom; this.dy = this.high / 2 - deep / 2 * this.zoom; this.draw();
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
    const { c, scale } = sized(this.canvas), colours = theme.read();
    c.setTransform(scale * this.zoom, 0, 0, scale * this.zoom, scale * this.dx, scale * this.dy);
    const left = -this.dx / this.zoom, top = -this.dy / this.zoom, sight = { left, top, right: left + this.wide / this.zoom, bottom: top + this.high / this.zoom };
    this.drawn = { boxes: 0, texts: 0, lines: 0 };
    this.paintLines(c, sight, colours);
    const seen = [];
    for (let i = this.first(this.list, sight.top - HIGH); i < this.list.length && this.list[i].y <= sight.bottom; i++)
      if (this.list[i].x + WIDE >= sight.left && this.list[i].x <= sight.right) seen.push(this.list[i]);
    this.paintBoxes(c, seen, colours);
    if (this.zoom >= LEGIBLE) this.paintTexts(c, seen, colours);
  }
  paintLines(c, sight, colours) {
    const near = new Path2D(), far = new Path2D(), short = 2 / this.zoom;  // what is under two pixels long cannot be seen
    for (let i = this.first(this.links, sight.top - this.longest - HIGH); i < this.links.length && this.links[i].y <= sight.bottom; i++) {
      const { from: p, to: q } = this.links[i], y1 = p.y + HIGH, y2 = q.y, x1 = p.x + WIDE / 2, x2 = q.x + WIDE / 2;
      if (Math.max(y1, y2) < sight.top || Math.max(x1, x2) < sight.left || Math.min(x1, x2) > sight.right) continue;
      const isLit = this.lit.has(p.key) || this.lit.has(q.key);
      if ((p.next && p.next !== q.key && !isLit) || Math.abs(x2 - x1) + Math.abs(y2 - y1) < short) continue;
      const path = isLit || Math.abs(y2 - y1) <= FAR ? near : far, bend = Math.min(60, Math.abs(y2 - y1) / 2);
      path.moveTo(x1, y1); this.drawn.lines++;
      if (this.zoom < LEGIBLE || x1 === x2) path.lineTo(x2, y2); else path.bezierCurveTo(x1, y1 + bend, x2, y2 - bend, x2, y2);
    }
    c.strokeStyle = colours.dim; c.lineWidth = Math.max(1, 0.5 / this.zoom);
    c.globalAlpha = 0.22; c.stroke(far); c.globalAlpha = 0.65; c.stroke(near); c.globalAlpha = 1;
  }
  // Boxes that look alike are one path, filled once.
  paintBoxes(c, seen, colours) {
    const papers = new Map(), bands = new Map(), borders = new Map(), into = (map, style) => { let path = map.get(style); if (!path) map.set(style, path = new Path2D()); return path; };
    const legible = this.zoom >= LEGIBLE;
    for (const b of seen) {
      const lit = this.lit.has(b.key), heavy = lit || b.fresh || b.result; this.drawn.boxes++;
      into(papers, lit ? colours.hit : legible ? colours.box : BAND[b.kind]).rect(b.x, b.y, WIDE, HIGH);
      if (legible) into(bands, BAND[b.kind]).rect(b.x, b.y, 5, HIGH);
      if (legible || lit || b.fresh) into(borders, `${heavy ? 2 : 1} ${lit ? colours.accent : b.fresh ? colours.new : b.result ? colours.dim : colours.line}`).rect(b.x, b.y, WIDE, HIGH);
    }
    for (const [style, path] of [...papers, ...bands]) { c.fillStyle = style; c.fill(path); }
    for (const [style, path] of borders) { c.lineWidth = Number(style[0]) / Math.min(1, this.zoom / LEGIBLE); c.strokeStyle = style.slice(2); c.stroke(path); }
  }
  paintTexts(c, seen, colours) {
    c.fillStyle = colours.text; c.font = TITLE;
    for (const b of seen) { b.shortTitle ??= fitted(b.title, TITLE, WIDE - 18); c.fillText(b.shortTitle, b.x + 12, b.y + 16); }
    this.drawn.texts += seen.length;
    if (this.zoom < 0.6) return;  // the second line would be smaller than 6 pixels
    c.fillStyle = colours.dim; c.font = SUB;
    for (const b of seen) { b.shortSub ??= fitted(b.sub, SUB, WIDE - 18); c.fillText(b.shortSub, b.x + 12, b.y + 32); }
    this.drawn.texts += seen.length;
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

