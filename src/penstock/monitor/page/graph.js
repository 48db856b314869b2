// The flow as a layered graph: messages go from left to right; on a narrow screen the drawing scrolls inside of its box. A line
// that passes a layer has a place of its own in it, so that it goes around the boxes.
import { element, end, fit, middle, printable, rate } from "/format.js";

const SVG = "http://www.w3.org/2000/svg";
const BOX = { width: 190, height: 46 }, LANE = 14, GAP = 16;
const INSIDE = BOX.width - 18 - 8;  // what a box has for its text
const drawn = { shape: "", nodes: new Map(), edges: new Map() };

function shape(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

// A node's layer is its longest path from a source; an edge that would close a cycle does not count.
function depths(graph) {
  const into = new Map(graph.nodes.map(node => [node.id, []])), out = new Map(graph.nodes.map(node => [node.id, []]));
  for (const edge of graph.edges) { into.get(edge.to).push(edge.from); out.get(edge.from).push(edge.to); }
  const depth = new Map(), open = new Set();
  const visit = id => {
    if (depth.has(id)) return depth.get(id);
    open.add(id);
    let most = 0;
    for (const before of into.get(id)) if (!open.has(before)) most = Math.max(most, visit(before) + 1);
    open.delete(id);
    depth.set(id, most);
    return most;
  };
  for (const node of graph.nodes) visit(node.id);
  const forward = graph.edges.filter(edge => depth.get(edge.from) < depth.get(edge.to));
  // A channel that only has readers stands beside the other channels, not among the publishers.
  for (const node of graph.nodes) if (node.type === "channel" && !into.get(node.id).length && out.get(node.id).length) {
    depth.set(node.id, Math.max(1, Math.min(...out.get(node.id).map(id => depth.get(id))) - 1));
  }
  // What comes after it moves on with it, however far. Without the edges that close cycles this ends.
  for (let moved = true; moved;) {
    moved = false;
    for (const { from, to } of forward) if (depth.get(to) <= depth.get(from)) { depth.set(to, depth.get(from) + 1); moved = true; }
  }
  return depth;
}

// Columns of boxes and lanes, sorted so that few lines cross; and for each edge the cells that it passes.
function layers(graph) {
  const depth = depths(graph), columns = [], routes = [];
  const cell = (at, id, node) => { const made = { id, node, into: [], out: [] }; (columns[at] ??= []).push(made); return made; };
  const cells = new Map([...graph.nodes].sort((a, b) => a.room.localeCompare(b.room) || a.label.localeCompare(b.label) || a.id.localeCompare(b.id))
    .map(node => [node.id, cell(depth.get(node.id), node.id, node)]));
  for (const edge of graph.edges) {
    const passes = [cells.get(edge.from)], first = depth.get(edge.from), last = depth.get(edge.to);
    for (let at = first + 1; at < last; at++) passes.push(cell(at, `${edge.from}\n${edge.to}\n${at}`, null));
    passes.push(cells.get(edge.to));
    for (let at = 1; at < passes.length; at++) { passes[at].into.push(passes[at - 1]); passes[at - 1].out.push(passes[at]); }
    routes.push({ edge, passes, back: last <= first });
  }
  const kept = columns.filter(Boolean);
  for (let round = 0; round < 8; round++) {
    for (const column of kept) column.forEach((one, at) => { one.at = (at + .5) / column.length; });
    for (const column of round % 2 ? [...kept].reverse() : kept) {
      for (const one of column) {
        const around = round % 2 ? one.out : one.into;
        one.pull = around.length ? around.reduce((sum, other) => sum + other.at, 0) / around.length : one.at;
      }
      column.sort((a, b) => a.pull - b.pull);
      column.forEach((one, at) => { one.at = (at + .5) / column.length; });
    }
  }
  return { columns: kept, routes };
}

function place(columns, room) {
  const gap = Math.max(56, Math.min(170, (room - 8 - columns.length * BOX.width) / Math.max(1, columns.length - 1)));
  const tall = column => column.reduce((sum, one) => sum + (one.node ? BOX.height : LANE) + GAP, 0);
  const height = Math.max(...columns.map(tall)) + 8;
  columns.forEach((column, number) => {
    // Spread a short column over the whole height, so that lines stay level.
    const spare = (height - tall(column)) / (column.length + 1);
    let y = spare;
    for (const one of column) {
      const own = one.node ? BOX.height : LANE;
      one.x = 4 + number * (BOX.width + gap); one.y = y + GAP / 2; one.width = BOX.width; one.height = own;
      y += own + GAP + spare;
    }
  });
  return { width: columns.length * BOX.width + (columns.length - 1) * gap + 8, height };
}

function line({ passes, back }) {
  const a = passes[0], b = passes[passes.length - 1];
  let x = a.x + a.width, y = a.y + a.height / 2, path = `M${x} ${y}`;
  if (back) {
    const low = Math.max(a.y + a.height, b.y + b.height) + GAP / 2, end = b.y + b.height / 2;
    return `${path}C${x + 44} ${y} ${x + 44} ${low} ${x} ${low}L${b.x} ${low}C${b.x - 44} ${low} ${b.x - 44} ${end} ${b.x} ${end}`;
  }
  for (const one of passes.slice(1)) {
    const toY = one.y + one.height / 2, bend = (one.x - x) / 2;
    path += `C${x + bend} ${y} ${one.x - bend} ${toY} ${one.x} ${toY}`;
    if (!one.node) path += `L${one.x + one.width} ${toY}`;
    x = one.x + one.width; y = toY;
  }
  return path;
}

function build(graph, holder) {
  const { columns, routes } = layers(graph), room = Math.max(240, holder.clientWidth - 4);
  const { width: wide, height } = place(columns, room), width = wide + (routes.some(route => route.back) ? 52 : 0);  // lines back go around
  const family = getComputedStyle(holder).fontFamily;
  const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "publishers, channels and subscribers" });
  drawn.nodes.clear(); drawn.edges.clear(); drawn.family = family;
  for (const route of routes) {
    const d = line(route);
    const still = shape("path", { class: "edge", d }, svg), pulse = shape("path", { class: "edge pulse idle", d }, svg);
    still.dataset.from = route.edge.from; still.dataset.to = route.edge.to;
    drawn.edges.set(route.edge.from + "\n" + route.edge.to, { still, pulse });
  }
  for (const { node, x, y, width: across } of columns.flat().filter(one => one.node)) {
    const group = shape("g", { class: `node ${node.type === "channel" ? "channel" : "user"}`, transform: `translate(${x} ${y})`, tabindex: 0 }, svg);
    shape("rect", { class: "box", width: across, height: BOX.height, rx: 8 }, group);
    const health = shape("rect", { class: "idle", width: 5, height: BOX.height - 12, x: 6, y: 6, rx: 2.5 }, group);
    shape("text", { x: 18, y: 19 }, group).textContent = fit(printable(node.label), INSIDE, `12px ${family}`, middle);
    const small = shape("text", { x: 18, y: 35, class: "small" }, group);
    drawn.nodes.set(node.id, { group, health, small, node });
    group.dataset.id = node.id;
  }
  holder.replaceChildren(svg);
}

// Lay out only when nodes or edges change; otherwise update widths, speeds, colours and figures.
export function draw(graph, holder, whenEmpty) {
  if (!graph.nodes.length) {
    if (drawn.shape !== whenEmpty) holder.replaceChildren(element("p", "empty", whenEmpty));
    drawn.shape = whenEmpty;
    return;
  }
  const key = [holder.clientWidth, ...graph.nodes.map(node => node.id).sort(), ...graph.edges.map(edge => edge.from + ">" + edge.to).sort()].join("\n");
  if (key !== drawn.shape) { build(graph, holder); drawn.shape = key; }
  for (const node of graph.nodes) {
    const parts = drawn.nodes.get(node.id);
    parts.node = node;
    parts.health.setAttribute("class", node.health);
    const lost = node.lost ? ` · ${node.lost} lost` : "", what = node.type === "channel" ? "" : ` · ${node.detail || node.type}`;
    const shown = fit(printable(`${rate(node.rate_hz)}${what}${lost}`), INSIDE, `10.5px ${drawn.family}`, end);
    if (parts.small.textContent !== shown) parts.small.textContent = shown;
    parts.group.dataset.health = node.health;
  }
  for (const edge of graph.edges) {
    const parts = drawn.edges.get(edge.from + "\n" + edge.to), strength = Math.log10(1 + edge.rate_hz);
    parts.still.style.strokeWidth = parts.pulse.style.strokeWidth = 1.5 + strength;
    parts.pulse.setAttribute("class", `edge pulse ${edge.rate_hz > 0 ? edge.health === "idle" ? "ok" : edge.health : "idle"}`);
    parts.pulse.style.animationDuration = `${Math.max(.25, 2.2 - strength * .4).toFixed(2)}s`;
  }
}

export function nodeUnder(target) {
  const group = target.closest?.(".node");
  return group ? drawn.nodes.get(group.dataset.id)?.node : null;
}
