// The flow as a layered graph: messages go from left to right (from top to bottom on a narrow screen).
import { rate, element } from "/plots.js";

const SVG = "http://www.w3.org/2000/svg";
const BOX = { width: 190, height: 46 };
const drawn = { shape: "", nodes: new Map(), edges: new Map() };

function shape(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

// A node's layer is its longest path from a source (cycles are cut); each layer is sorted by its neighbours' positions.
function layers(graph) {
  const into = new Map(graph.nodes.map(node => [node.id, []]));
  const out = new Map(graph.nodes.map(node => [node.id, []]));
  for (const edge of graph.edges) { into.get(edge.to).push(edge.from); out.get(edge.from).push(edge.to); }
  const depth = new Map();
  const visit = (id, path) => {
    if (depth.has(id)) return depth.get(id);
    let most = 0;
    for (const before of into.get(id)) if (!path.has(before)) most = Math.max(most, visit(before, new Set(path).add(id)) + 1);
    depth.set(id, most);
    return most;
  };
  for (const node of graph.nodes) visit(node.id, new Set([node.id]));
  // Place a channel that only has readers beside its peers, not in the first column.
  for (const node of graph.nodes) if (node.type === "channel" && !into.get(node.id).length && out.get(node.id).length) {
    depth.set(node.id, Math.max(1, Math.min(...out.get(node.id).map(id => depth.get(id))) - 1));
    for (const id of out.get(node.id)) depth.set(id, Math.max(depth.get(id), depth.get(node.id) + 1));
  }
  const columns = [];
  for (const node of [...graph.nodes].sort((a, b) => a.room.localeCompare(b.room) || a.label.localeCompare(b.label) || a.id.localeCompare(b.id)))
    (columns[depth.get(node.id)] ??= []).push(node);
  const kept = columns.filter(Boolean);
  for (let round = 0; round < 6; round++) {
    const place = new Map();
    for (const column of kept) column.forEach((node, at) => place.set(node.id, (at + .5) / column.length));
    const order = round % 2 ? [...kept].reverse() : kept;
    for (const column of order) {
      const middle = node => {
        const around = [...(round % 2 ? out : into).get(node.id)].map(id => place.get(id)).filter(x => x !== undefined);
        return around.length ? around.reduce((a, b) => a + b) / around.length : place.get(node.id);
      };
      const key = new Map(column.map(node => [node.id, middle(node)]));
      column.sort((a, b) => key.get(a.id) - key.get(b.id));
      column.forEach((node, at) => place.set(node.id, (at + .5) / column.length));
    }
  }
  return kept;
}

const clip = (text, most) => text.length > most ? "…" + text.slice(1 - most) : text;
const cut = (text, most) => text.length > most ? text.slice(0, most - 1) + "…" : text;

function build(graph, holder, narrow) {
  const columns = layers(graph);
  const tallest = Math.max(...columns.map(column => column.length));
  const room = Math.max(240, holder.clientWidth - 4);
  const across = narrow ? Math.min(BOX.width, Math.max(120, room / Math.min(tallest, 2) - 12)) : BOX.width;
  const gapX = narrow ? 12 : Math.max(60, Math.min(190, (room - columns.length * BOX.width) / Math.max(1, columns.length - 1)));
  const gapY = narrow ? 54 : 16;
  const place = new Map();
  let width, height;
  if (narrow) {
    const per = Math.max(1, Math.floor((room + gapX) / (across + gapX)));
    let y = 4;
    for (const column of columns) {
      column.forEach((node, at) => {
        const row = Math.floor(at / per), inRow = Math.min(per, column.length - row * per);
        const left = (room - inRow * across - (inRow - 1) * gapX) / 2;
        place.set(node.id, { x: left + (at % per) * (across + gapX), y: y + row * (BOX.height + 10) });
      });
      y += Math.ceil(column.length / per) * (BOX.height + 10) - 10 + gapY;
    }
    width = room; height = y - gapY + 4;
  } else {
    height = tallest * (BOX.height + gapY) - gapY + 8;
    width = columns.length * BOX.width + (columns.length - 1) * gapX + 8;
    columns.forEach((column, number) => {
      const step = height / column.length;
      column.forEach((node, at) => place.set(node.id, { x: 4 + number * (BOX.width + gapX), y: step * (at + .5) - BOX.height / 2 }));
    });
  }
  const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  drawn.nodes.clear(); drawn.edges.clear();
  for (const edge of graph.edges) {
    const a = place.get(edge.from), b = place.get(edge.to);
    const path = narrow ? curveDown(a, b, across) : curveRight(a, b);
    const still = shape("path", { class: "edge", d: path }, svg);
    const pulse = shape("path", { class: "edge pulse idle", d: path }, svg);
    drawn.edges.set(edge.from + "\n" + edge.to, { still, pulse });
  }
  for (const node of graph.nodes) {
    const { x, y } = place.get(node.id);
    const group = shape("g", { class: `node ${node.type === "channel" ? "channel" : "user"}`, transform: `translate(${x} ${y})` }, svg);
    shape("rect", { class: "box", width: across, height: BOX.height, rx: 8 }, group);
    const health = shape("rect", { class: "idle", width: 5, height: BOX.height - 12, x: 6, y: 6, rx: 2.5 }, group);
    const letters = Math.floor((across - 24) / 6.9);
    shape("text", { x: 18, y: 19 }, group).textContent = clip(node.label, letters);
    const small = shape("text", { x: 18, y: 35, class: "small" }, group);
    drawn.nodes.set(node.id, { group, health, small, node, letters: Math.floor((across - 24) / 5.7) });
    group.dataset.id = node.id;
  }
  holder.replaceChildren(svg);
}

function curveRight(a, b) {
  const x0 = a.x + BOX.width, y0 = a.y + BOX.height / 2, x1 = b.x, y1 = b.y + BOX.height / 2;
  if (x1 > x0) { const bend = Math.max(30, (x1 - x0) / 2); return `M${x0} ${y0}C${x0 + bend} ${y0} ${x1 - bend} ${y1} ${x1} ${y1}`; }
  const drop = Math.max(y0, y1) + BOX.height * .9;
  return `M${x0} ${y0}C${x0 + 60} ${drop} ${x1 - 60} ${drop} ${x1} ${y1}`;
}

function curveDown(a, b, across) {
  const x0 = a.x + across / 2, y0 = a.y + BOX.height, x1 = b.x + across / 2, y1 = b.y;
  const bend = Math.max(18, Math.abs(y1 - y0) / 2);
  return `M${x0} ${y0}C${x0} ${y0 + bend} ${x1} ${y1 - bend} ${x1} ${y1}`;
}

// Rebuild the drawing only when nodes or edges change; otherwise update widths, speeds, colours and figures.
export function draw(graph, holder) {
  if (!graph.nodes.length) {
    holder.replaceChildren(element("p", "empty", "Nothing of Penstock is open on this machine yet. Try: penstock demo"));
    drawn.shape = "";
    return;
  }
  const narrow = holder.clientWidth < 620;
  const key = [narrow, holder.clientWidth, ...graph.nodes.map(node => node.id).sort(), ...graph.edges.map(edge => edge.from + ">" + edge.to).sort()].join("\n");
  if (key !== drawn.shape) { build(graph, holder, narrow); drawn.shape = key; }
  for (const node of graph.nodes) {
    const parts = drawn.nodes.get(node.id);
    parts.node = node;
    parts.health.setAttribute("class", node.health);
    const lost = node.lost ? ` · ${node.lost} lost` : "";
    const what = node.type === "channel" ? "" : ` · ${node.detail || node.type}`;
    parts.small.textContent = cut(`${rate(node.rate_hz)}${what}${lost}`, parts.letters);
    parts.group.dataset.health = node.health;
  }
  for (const edge of graph.edges) {
    const parts = drawn.edges.get(edge.from + "\n" + edge.to);
    const strength = Math.log10(1 + edge.rate_hz);
    parts.still.style.strokeWidth = 1.5 + strength;
    parts.pulse.style.strokeWidth = 1.5 + strength;
    parts.pulse.setAttribute("class", `edge pulse ${edge.rate_hz > 0 ? edge.health === "idle" ? "ok" : edge.health : "idle"}`);
    parts.pulse.style.animationDuration = `${Math.max(.25, 2.2 - strength * .4).toFixed(2)}s`;
  }
}

export function nodeUnder(target) {
  const group = target.closest?.(".node");
  return group ? drawn.nodes.get(group.dataset.id)?.node : null;
}
