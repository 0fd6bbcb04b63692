// Curves and the swap graph. Colours come from the style sheet, so that light and dark have one source.
"use strict";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Colours that are far apart for neighbours in a list: steps of the golden angle.
function listColour(index) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  return `hsl(${(210 + 137.5 * index) % 360} 62% ${dark ? 65 : 42}%)`;
}

// Times of the day, or days when the curve is longer than that.
function clock(ticks) {
  const step = ticks.length > 1 ? ticks[1] - ticks[0] : 60;
  const time = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  const parts = step >= 43200 ? { month: "short", day: "numeric" } : step < 60 ? { ...time, second: "2-digit" } : time;
  return ticks.map((tick) => new Date(1000 * tick).toLocaleString([], parts));
}

class Chart {
  constructor(id, format) {
    this.place = document.getElementById(id);
    this.format = format;
    this.series = [];
    this.data = [[]];
    new ResizeObserver(() => this.plot && this.plot.setSize(this.size())).observe(this.place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  size() { return { width: Math.max(200, this.place.clientWidth), height: 205 }; }

  // series: [{label, stroke (name of a variable or a colour), width, dash}]; data: [times, values, ...].
  set(series, data) {
    const same = this.plot && JSON.stringify(series) === JSON.stringify(this.series);
    this.series = series;
    this.data = data;
    if (same) this.plot.setData(data);
    else this.draw();
  }

  draw() {
    if (this.plot) this.plot.destroy();
    const grid = { stroke: colour("--rule"), width: 1 };
    const axis = { stroke: colour("--soft"), grid, ticks: grid, font: "12px system-ui, sans-serif" };
    this.plot = new uPlot({
      ...this.size(),
      cursor: { y: false, points: { show: this.series.length < 8 } },
      legend: { show: false },
      axes: [{ ...axis, values: (_, ticks) => clock(ticks), space: 70, size: 32 }, { ...axis, size: 58, values: (_, ticks) => ticks.map(this.format) }],
      series: [{}, ...this.series.map((one) => ({
        ...one, stroke: one.stroke.startsWith("--") ? colour(one.stroke) : one.stroke, spanGaps: true,
        points: { show: false },
      }))],
    }, this.data, this.place);
  }
}

// Peers on a circle in the order of their ids; a chord for each pair that met, which fades in two minutes.
class Graph {
  constructor(id) {
    this.canvas = document.getElementById(id);
    this.last = [[], [], 0];
    new ResizeObserver(() => this.draw(...this.last)).observe(this.canvas);
  }

  // peers: [{id, health}]; meetings: [[at_s, peer, partner]]
  draw(peers, meetings, now) {
    this.last = [peers, meetings, now];
    const scale = devicePixelRatio || 1, width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const radius = Math.max(20, Math.min(width, height) / 2 - (peers.length <= 24 ? 26 : 8));
    const place = new Map(peers.map((peer, index) => {
      const angle = 2 * Math.PI * index / peers.length - Math.PI / 2;
      return [peer.id, [width / 2 + radius * Math.cos(angle), height / 2 + radius * Math.sin(angle), angle]];
    }));
    pen.strokeStyle = colour("--blue");
    for (const [at, peer, partner] of meetings) {
      const from = place.get(peer), to = place.get(partner);
      if (!from || !to) continue;
      pen.globalAlpha = Math.max(0.06, 1 - (now - at) / 120) * (peers.length > 200 ? 0.4 : 0.9);
      pen.lineWidth = peers.length > 200 ? 0.6 : 1.5;
      pen.beginPath();
      pen.moveTo(from[0], from[1]);
      pen.quadraticCurveTo(width / 2, height / 2, to[0], to[1]);
      pen.stroke();
    }
    pen.globalAlpha = 1;
    const size = peers.length > 200 ? 1.2 : peers.length > 24 ? 3 : 6;
    const fill = { alive: colour("--green"), silent: colour("--amber"), leaving: colour("--blue") };
    const grey = colour("--faint"), ink = colour("--soft");
    pen.font = "11px ui-monospace, monospace";
    for (const peer of peers) {
      const [x, y, angle] = place.get(peer.id);
      pen.fillStyle = fill[peer.health] || grey;
      pen.beginPath();
      pen.arc(x, y, size, 0, 7);
      pen.fill();
      if (peers.length <= 24) {
        pen.fillStyle = ink;
        pen.textAlign = Math.cos(angle) < -0.1 ? "right" : Math.cos(angle) > 0.1 ? "left" : "center";
        pen.fillText(peer.id.slice(-6), x + 11 * Math.cos(angle), y + 13 * Math.sin(angle) + 4);
      }
    }
    this.canvas.setAttribute("aria-label", `Swap graph: ${peers.length} peers, their last ${meetings.length} swaps`);
  }
}
