// Time plots on a canvas: lines or stacked bars, a linear or a logarithmic axis, series that a click on their name shows or
// hides, and a range that dragging chooses (a double click gives the whole span back).
import { UNITS, element, nameIn, printable, reconcile, span as spanText, text } from "/format.js";

const MOST = 12;  // series a plot draws: the busiest, or those that were asked for
const MARGIN = { left: 62, right: 8, top: 8, bottom: 20 };
export const choice = { log: false, hidden: new Set(), zoom: null };

// A name has its colour and its dashes of itself, on every plot and after every restart: one of 24 hues of the same
// lightness, and one of three ways to draw a line.
const HUES = 24, DASHES = [[], [6, 3], [2, 2]];
export function look(name) {
  const at = number(name), hue = at % HUES * 360 / HUES;
  return { colour: `oklch(${getComputedStyle(document.documentElement).getPropertyValue("--series").trim()} ${hue})`, dash: DASHES[Math.floor(at / HUES) % DASHES.length] };
}
// FNV-1a, then mixed: the low bits alone of names that end alike would be alike.
function number(name) {
  let hash = 0x811c9dc5;
  for (const letter of name) hash = Math.imul(hash ^ letter.codePointAt(0), 0x01000193);
  return (Math.imul(hash ^ hash >>> 15, 0x2c1b3c6d) >>> 8);
}

export class Plot {
  constructor(canvas, redraw) {
    this.canvas = canvas; this.redraw = redraw;
    this.prefix = canvas.dataset.plot;
    this.unit = UNITS[canvas.dataset.unit];
    this.bars = canvas.dataset.shape === "bars";
    this.keys = canvas.parentElement.querySelector(".keys");
    this.more = canvas.parentElement.querySelector(".more");
    this.cursor = this.from = null;
    canvas.addEventListener("pointermove", event => { this.cursor = event.offsetX; this.draw(); });
    canvas.addEventListener("pointerleave", () => { this.cursor = null; this.draw(); });
    canvas.addEventListener("pointerdown", event => { this.from = event.offsetX; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointercancel", () => { this.from = this.cursor = null; this.draw(); });  // a finger that scrolls the page
    canvas.addEventListener("pointerup", event => this.choose(event.offsetX));
    canvas.addEventListener("dblclick", () => { choice.zoom = null; this.redraw(); });
  }

  choose(to) {
    const from = this.from;
    this.from = null;
    if (from === null || Math.abs(to - from) < 8) return;
    const time = x => this.start + (x - MARGIN.left) / (this.canvas.clientWidth - MARGIN.left - MARGIN.right) * (this.end - this.start);
    choice.zoom = [Math.max(this.start, time(Math.min(from, to))), Math.min(this.end, time(Math.max(from, to)))];
    this.redraw();
  }

  // `wanted` is a part of the names to show, or nothing.
  show(times, series, span, wanted) {
    this.times = times;
    this.wanted = wanted;
    const newest = times[times.length - 1];
    [this.start, this.end] = choice.zoom ?? [newest - span, newest];
    this.first = Math.max(0, times.findIndex(time => time >= this.start));
    const found = Object.entries(series).filter(([name]) => name.startsWith(this.prefix))
      .map(([name, values]) => ({ name: name.slice(this.prefix.length), values }))
      .filter(one => !wanted || this.prefix === "lost/" || one.name.includes(wanted))
      .map(one => ({ ...one, most: this.most(one.values) })).filter(one => one.most !== null);
    found.sort((a, b) => b.most - a.most || a.name.localeCompare(b.name));
    if (this.more) text(this.more, found.length > MOST ? `the ${MOST} largest of ${found.length}; type a part of a name above to see others` : "");
    this.series = found.slice(0, MOST).sort((a, b) => a.name.localeCompare(b.name));
    this.draw();
  }

  most(values) {
    let found = null;
    for (let at = this.first; at < this.times.length && this.times[at] <= this.end; at++) if (values[at] !== null && values[at] !== undefined) found = Math.max(found ?? 0, values[at]);
    return found;
  }

  draw() {
    const { canvas, times, series, start, end } = this;
    if (!times || !times.length || !canvas.clientWidth) return;
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight, { left, right, top, bottom } = MARGIN;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) { canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); }
    const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const shown = series.filter(one => !choice.hidden.has(one.name));
    const log = choice.log && !this.bars;
    let most = Math.max(0, ...shown.map(one => one.most)), least = Infinity;
    if (this.bars) for (let at = this.first; at < times.length; at++) most = Math.max(most, shown.reduce((sum, one) => sum + (one.values[at] ?? 0), 0));
    for (const one of shown) for (let at = this.first; at < times.length; at++) if (one.values[at] && (!log || one.values[at] > 0)) least = Math.min(least, one.values[at]);
    const low = log ? 10 ** Math.floor(Math.log10(Number.isFinite(least) ? least : 1)) : least < 0 ? -nice(-least) : 0;
    const high = log ? Math.max(low * 10, 10 ** Math.ceil(Math.log10(most || 1))) : nice(most || 1);
    const x = time => left + (time - start) / (end - start) * (width - left - right);
    const part = value => log ? Math.log10(Math.max(value, low) / low) / Math.log10(high / low) : (value - low) / (high - low);
    const y = value => height - bottom - part(value) * (height - top - bottom);
    pen.font = "11px system-ui, sans-serif"; pen.fillStyle = style.getPropertyValue("--soft"); pen.strokeStyle = style.getPropertyValue("--line"); pen.lineWidth = 1;
    pen.textAlign = "right"; pen.textBaseline = "middle";
    for (const value of log ? decades(low, high) : [low, (low + high) / 2, high]) {
      const at = Math.round(y(value)) + .5;
      pen.beginPath(); pen.moveTo(left, at); pen.lineTo(width - right, at); pen.stroke();
      pen.fillText(this.unit(value).replace(/(\.\d*?)0+(?!\d)/, "$1").replace(/\.(?!\d)/, ""), left - 6, at);
    }
    pen.textBaseline = "alphabetic";
    const newest = times[times.length - 1], when = time => newest - time < 1 ? "now" : `−${spanText(newest - time)}`;
    pen.textAlign = "left"; pen.fillText(when(start), left, height - 5);
    pen.textAlign = "center"; pen.fillText(when((start + end) / 2), (left + width - right) / 2, height - 5);
    pen.textAlign = "right"; pen.fillText(when(end), width - right, height - 5);
    if (!shown.length) { pen.textAlign = "center"; pen.fillText(series.length ? "all names are hidden" : this.bars ? "nothing was lost" : this.wanted ? "nothing of that name" : "nothing measured", (left + width) / 2, (top + height - bottom) / 2 - 8); }
    pen.save(); pen.beginPath(); pen.rect(left - 2, 0, width - left - right + 4, height - bottom + 1); pen.clip();
    if (this.bars) this.drawBars(pen, shown, x, y); else this.drawLines(pen, shown, x, y);
    if (this.from !== null && this.cursor !== null) { pen.fillStyle = style.getPropertyValue("--accent"); pen.globalAlpha = .15; pen.fillRect(Math.min(this.from, this.cursor), top, Math.abs(this.cursor - this.from), height - top - bottom); pen.globalAlpha = 1; }
    this.drawCursor(pen, x, height, width, style);
    pen.restore();
  }

  drawLines(pen, shown, x, y) {
    pen.lineWidth = 1.7; pen.lineJoin = "round";
    for (const one of shown) {
      const { colour, dash } = look(one.name); pen.strokeStyle = colour; pen.setLineDash(dash); pen.beginPath();
      let drawing = false;
      for (let at = Math.max(0, this.first - 1); at < this.times.length; at++) {
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

  drawBars(pen, shown, x, y) {
    const wide = Math.max(1.5, x(this.times[1] ?? this.times[0] + 1) - x(this.times[0]) - .5);
    for (let at = this.first; at < this.times.length; at++) {
      let base = 0;
      for (const one of shown) {
        const value = one.values[at] ?? 0;
        if (!value) continue;
        pen.fillStyle = look(one.name).colour;
        pen.fillRect(x(this.times[at]) - wide, y(base + value), wide, y(base) - y(base + value));
        base += value;
      }
    }
  }

  drawCursor(pen, x, height, width, style) {
    let at = this.times.length - 1;
    while (at > 0 && this.times[at] > this.end) at--;
    if (this.cursor !== null && this.cursor >= MARGIN.left) {
      const wanted = this.start + (this.cursor - MARGIN.left) / (width - MARGIN.left - MARGIN.right) * (this.end - this.start);
      while (at > 0 && this.times[at - 1] >= wanted) at--;
      pen.strokeStyle = style.getPropertyValue("--soft"); pen.lineWidth = 1; pen.beginPath();
      pen.moveTo(x(this.times[at]), MARGIN.top); pen.lineTo(x(this.times[at]), height - MARGIN.bottom); pen.stroke();
    }
    reconcile(this.keys, this.series, one => one.name, one => this.makeKey(one), (key, one) => {
      const value = one.values[at] ?? null;
      const { colour, dash } = look(one.name), [on, off] = dash.length && !this.bars ? dash : [1, 0];
      key.querySelector("i").style.background = `repeating-linear-gradient(90deg, ${colour} 0 ${on}px, transparent ${on}px ${on + off}px)`;
      key.dataset.colour = colour;
      nameIn(key.querySelector("span"), one.name, Math.min(230, this.keys.clientWidth - 110)); key.querySelector("span").title = "";
      key.setAttribute("aria-pressed", !choice.hidden.has(one.name));
      key.dataset.value = value ?? "";
      text(key.querySelector("b"), value === null ? "–" : this.unit(value));
    });
  }

  makeKey(one) {
    const key = element("button");
    key.type = "button"; key.title = `${printable(one.name)}: click to hide or show`; key.dataset.name = one.name;
    key.append(element("i"), element("span"), element("b"));
    key.children[1].dataset.size = "12px";
    key.addEventListener("click", () => { if (!choice.hidden.delete(one.name)) choice.hidden.add(one.name); this.redraw(); });
    return key;
  }
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 4, 5, 8, 10].map(step => step * power).find(step => step >= value * .999) ?? value;
}

function decades(low, high) {
  const marks = [];
  for (let value = low; value <= high * 1.001; value *= 10) marks.push(value);
  return marks.length <= 5 ? marks : marks.filter((_, at) => at % Math.ceil(marks.length / 4) === 0);
}
