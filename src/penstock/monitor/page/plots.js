// Formats numbers, and draws time plots on a canvas.

export function element(name, kind, text) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

function scaled(value, step) {
  let at = 0;
  const prefixes = ["", "k", "M", "G", "T"];
  while (Math.abs(value) >= step && at < prefixes.length - 1) { value /= step; at++; }
  return [value, prefixes[at]];
}
const digits = value => Math.abs(value) >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toPrecision(3);

export const rate = hz => { const [value, prefix] = scaled(hz, 1000); return `${digits(value)}${prefix ? " " + prefix : ""}/s`; };
export const bytes = count => { const [value, prefix] = scaled(count, 1000); return `${digits(value)} ${prefix}B`; };
export const count = number => Math.round(number).toLocaleString("en-US");
export const micros = us => us < 1000 ? `${digits(us)} µs` : us < 1e6 ? `${digits(us / 1000)} ms` : `${digits(us / 1e6)} s`;
export const UNITS = { hz: rate, us: micros, count: value => Math.abs(value) < 10000 ? digits(value) : scaled(value, 1000).map((part, at) => at ? part : digits(part)).join(""), megabytes: value => bytes(value * 1e6), bytes: value => bytes(value) + "/s" };

// An address has the same colour on every plot, in order of first appearance; losses and processes have an order of
// their own. After the eighth, colours repeat with dashes.
const seen = { address: new Map(), lost: new Map(), memory: new Map() };
function look(plot, name) {
  const order = seen[plot.prefix.split("/")[0]] ?? seen.address;
  if (!order.has(name)) order.set(name, order.size);
  const at = order.get(name);
  return { colour: getComputedStyle(document.documentElement).getPropertyValue(`--s${at % 8}`).trim(), dash: at >= 8 ? [5, 3] : [] };
}

export class Plot {
  constructor(canvas) {
    this.canvas = canvas;
    this.prefix = canvas.dataset.plot;
    this.unit = UNITS[canvas.dataset.unit];
    this.bars = canvas.dataset.shape === "bars";
    this.fit = canvas.dataset.base === "fit";  // from the least value to the greatest, not from 0
    this.keys = canvas.parentElement.querySelector(".keys");
    this.cursor = null;
    canvas.addEventListener("pointermove", event => { this.cursor = event.offsetX; this.draw(); });
    canvas.addEventListener("pointerleave", () => { this.cursor = null; this.draw(); });
  }

  show(times, series, span) {
    this.times = times; this.span = span;
    this.series = Object.entries(series).filter(([name]) => name.startsWith(this.prefix))
      .map(([name, values]) => ({ name: name.slice(this.prefix.length), values }))
      .filter(one => one.values.some(value => value !== null)).sort((a, b) => a.name.localeCompare(b.name));
    this.draw();
  }

  draw() {
    const { canvas, times, series } = this;
    if (!times || !times.length) return;
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    if (canvas.width !== width * ratio || canvas.height !== height * ratio) { canvas.width = width * ratio; canvas.height = height * ratio; }
    const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const left = 58, right = 6, top = 8, bottom = 20;
    const end = times[times.length - 1], start = end - this.span;
    let first = times.findIndex(time => time >= start); if (first < 0) first = times.length;
    let most = 0;
    for (let at = first; at < times.length; at++) {
      if (this.bars) most = Math.max(most, series.reduce((sum, one) => sum + (one.values[at] ?? 0), 0));
      else for (const one of series) most = Math.max(most, one.values[at] ?? 0);
    }
    let least = 0;
    if (this.fit) [least, most] = limits(series.flatMap(one => one.values.slice(first).filter(value => value !== null)));
    else most = nice(most || 1);
    const x = time => left + (time - start) / this.span * (width - left - right);
    const y = value => height - bottom - (value - least) / (most - least) * (height - top - bottom);
    pen.font = "11px system-ui, sans-serif"; pen.fillStyle = style.getPropertyValue("--soft"); pen.strokeStyle = style.getPropertyValue("--line"); pen.lineWidth = 1;
    pen.textAlign = "right"; pen.textBaseline = "middle";
    for (const part of [0, .5, 1]) {
      const level = least + (most - least) * part, at = Math.round(y(level)) + .5;
      pen.beginPath(); pen.moveTo(left, at); pen.lineTo(width - right, at); pen.stroke();
      pen.fillText(this.unit(level), left - 6, at);
    }
    pen.textBaseline = "alphabetic"; pen.textAlign = "left"; pen.fillText(ago(this.span), left, height - 5);
    pen.textAlign = "center"; pen.fillText(ago(this.span / 2), (left + width - right) / 2, height - 5);
    pen.textAlign = "right"; pen.fillText("now", width - right, height - 5);
    if (!series.length) { pen.textAlign = "center"; pen.fillText(this.bars ? "nothing was lost" : "nothing measured yet", (left + width) / 2, (top + height - bottom) / 2); }
    if (this.bars) this.drawBars(pen, x, y, first, width, left, right); else this.drawLines(pen, x, y, first);
    this.drawCursor(pen, x, top, height - bottom, left, right, width, style);
  }

  drawLines(pen, x, y, first) {
    pen.lineWidth = 1.7; pen.lineJoin = "round";
    for (const one of this.series) {
      const { colour, dash } = look(this, one.name); pen.strokeStyle = colour; pen.setLineDash(dash); pen.beginPath();
      let drawing = false;
      for (let at = Math.max(0, first - 1); at < this.times.length; at++) {
        const value = one.values[at];
        if (value === null || value === undefined) { drawing = false; continue; }
        if (drawing) pen.lineTo(x(this.times[at]), y(value));
        else { pen.moveTo(x(this.times[at]) - 1, y(value)); pen.lineTo(x(this.times[at]), y(value)); }  // a lone sample is seen too
        drawing = true;
      }
      pen.stroke();
    }
    pen.setLineDash([]);
  }

  drawBars(pen, x, y, first, width, left, right) {
    const wide = Math.max(1, (width - left - right) / this.span - .5);
    for (let at = first; at < this.times.length; at++) {
      let base = 0;
      for (const one of this.series) {
        const value = one.values[at] ?? 0;
        if (!value) continue;
        pen.fillStyle = look(this, one.name).colour;
        pen.fillRect(x(this.times[at]) - wide, y(base + value), wide, y(base) - y(base + value));
        base += value;
      }
    }
  }

  drawCursor(pen, x, top, bottom, left, right, width, style) {
    let at = this.times.length - 1;
    if (this.cursor !== null && this.cursor >= left) {
      const wanted = this.times[at] - this.span + (this.cursor - left) / (width - left - right) * this.span;
      while (at > 0 && this.times[at - 1] >= wanted) at--;
      pen.strokeStyle = style.getPropertyValue("--soft"); pen.lineWidth = 1; pen.beginPath();
      pen.moveTo(x(this.times[at]), top); pen.lineTo(x(this.times[at]), bottom); pen.stroke();
    }
    this.keys.replaceChildren(...this.series.map(one => {
      const key = element("span"), mark = element("i");
      mark.style.background = look(this, one.name).colour;
      const value = one.values[at];
      key.title = one.name;
      key.append(mark, element("span", "", one.name), element("b", "", value === null || value === undefined ? "–" : this.unit(value)));
      key.dataset.name = one.name; key.dataset.value = value ?? "";
      return key;
    }));
  }
}

function limits(values) {
  if (!values.length) return [0, 1];
  let least = Infinity, most = -Infinity;
  for (const value of values) { least = Math.min(least, value); most = Math.max(most, value); }
  const room = (most - least || Math.abs(most) || 1) * .05;
  return [least - room, most + room];
}
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 4, 5, 8, 10].map(step => step * power).find(step => step >= value * .999) ?? value;
}
const ago = seconds => seconds >= 120 ? `−${+(seconds / 60).toFixed(1)} min` : `−${Math.round(seconds)} s`;
