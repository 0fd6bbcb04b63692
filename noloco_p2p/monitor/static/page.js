// Keeps the data from the monitor in one map of peers, and shows it as tiles, curves, a graph and a table.
"use strict";

const POLL_S = 3, TIMEOUT_S = 10, MANY_PEERS = 40, PAGE = 50, RATE_S = 60;
const $ = (id) => document.getElementById(id);
const text = (id, value) => { const node = $(id); if (node.textContent !== value) node.textContent = value; };

// Formats numbers for people.
const count = (n) => n >= 1e9 ? (n / 1e9).toPrecision(3) + "B" : n >= 1e6 ? (n / 1e6).toPrecision(3) + "M"
  : n >= 1e4 ? (n / 1e3).toPrecision(3) + "k" : String(Math.round(n));
const bytes = (n) => { for (const unit of ["B", "KiB", "MiB", "GiB"]) { if (n < 1024) return `${unit === "B" ? n : n.toFixed(1)} ${unit}`; n /= 1024; } return `${n.toFixed(1)} TiB`; };
const loss = (n) => n === null ? "–" : n.toFixed(3);
const share = (n) => n === null ? "–" : n < 1e-4 ? "< 0.01 %" : n < 0.1 ? `${+(100 * n).toPrecision(2)} %` : `${Math.round(100 * n)} %`;
const span = (s) => s < 60 ? `${Math.round(s)} s` : s < 3600 ? `${Math.floor(s / 60)} min` : s < 86400 ? `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min` : `${Math.floor(s / 86400)} d`;
const part = (n) => n === 0 ? "0 %" : share(n);
const short = (id) => id ? id.slice(-6) : "–";

const state = { peers: new Map(), head: null, history: null, offset: 0, sort: "state", down: false, words: "", page: 0 };
const now = () => Date.now() / 1000 + state.offset;
const ORDER = ["alive", "silent", "leaving", "left", "gone"];
const known = (format) => (n) => n === null ? "–" : format(n);
const FORMATS = { "nats/token": loss, "tokens/s": count, "bytes": bytes, "peer id": short, "s": known(span), "tokens": known(count) };  // by unit
const FIRST = [
  { name: "peer", show: (p) => short(p.peer_id), key: (p) => p.peer_id, text: true },
  { name: "stage", show: (p) => p.stage ?? "–", key: (p) => p.stage, staged: true },
  { name: "name", show: (p) => p.name || "–", key: (p) => p.name || null, text: true, named: true },
  { name: "state", show: (p) => p.health !== "alive" ? p.health : p.paused_by ? `${p.state} (${p.paused_by})` : p.state, key: (p) => ORDER.indexOf(p.health) + p.state + p.peer_id, text: true },
];
const LAST = [
  { name: "apart", show: (p) => share(p.distance), key: (p) => p.distance },
  { name: "reach", show: (p) => p.reachability, key: (p) => p.reachability, text: true, wide: true },
  { name: "version", show: (p) => p.software, key: (p) => p.software, text: true, wide: true },
  { name: "heard", show: (p) => `${span(Math.max(0, p.age_s + now() - state.head.time_s))} ago`, key: (p) => p.age_s },
];
let COLUMNS = [];  // the columns of metrics, which the monitor describes, are between FIRST and LAST

function setColumns(told) {
  const columns = told.map(({ key, unit, ...column }) => {
    const show = FORMATS[unit] || String;
    return { ...column, show: (p) => show(p[key]), key: (p) => p[key] };
  });
  COLUMNS = [...FIRST, ...columns, ...LAST];
  makeHead();
}

const STAGE_CELLS = [
  (s) => s.stage === 0 ? "0 (head)" : s.stage, (s) => s.peers || "empty", (s) => count(s.capacity), (s) => count(s.tokens_per_s),
  (s) => s.queue, (s) => s.microbatches, (s) => part(s.late_share), (s) => part(s.lost_share), (s) => share(s.spread),
];
const classes = (column) => ["text", "wide", "staged", "named"].filter((name) => column[name]).join(" ");

let charts, graph, paths;

// Returns null if the monitor does not answer in time.
async function get(path) {
  try {
    const answer = await fetch(path, { signal: AbortSignal.timeout(1000 * TIMEOUT_S) });
    return answer.ok ? await answer.json() : null;
  } catch (error) {
    return null;
  }
}

// Read the swarm, and the curves if a new sample is due. The next poll begins POLL_S after this one has ended.
async function poll() {
  try {
    const news = await get("api/status");
    if (news) take(news);
    else {
      $("link").className = "lost";
      text("link", `no connection to the monitor; showing data from ${new Date(1000 * (state.head ? state.head.time_s : now())).toLocaleTimeString()}`);
      if (state.head) showTable();  // ages increase even without updates
    }
    const last = state.history ? state.history.time_s.at(-1) + state.history.interval_s : 0;
    if (news && news.time_s >= last) await loadCurves();
  } finally {
    setTimeout(poll, 1000 * POLL_S);
  }
}

function take(news) {
  if (!state.head) setColumns(news.columns);
  if (news.time_s !== state.head?.time_s) state.offset = news.time_s - Date.now() / 1000;
  state.head = news;
  state.peers = new Map(news.peers.map((peer) => [peer.peer_id, peer]));
  $("link").className = "";
  text("link", `${new Date(1000 * news.time_s).toLocaleTimeString()}, live`);
  showHead();
  showStages();
  showGraph();
  showTable();
  document.body.dataset.updates = Number(document.body.dataset.updates || 0) + 1;
}

async function loadCurves() {
  const history = await get(`api/history?${shownCurves().map((name) => `id=${encodeURIComponent(name)}`).join("&")}`);
  if (!history) return;
  state.history = history;
  showCharts();
}

function shownCurves() {
  const shown = state.peers.size <= MANY_PEERS ? [...state.peers.values()] : state.words ? chosen() : [];
  const heads = shown.filter((peer) => !peer.stage).map((peer) => peer.peer_id);  // other stages have no loss
  return heads.slice(0, MANY_PEERS);
}

// Growth per second of a count over about a minute. A decrease (a peer was forgotten) counts as no growth.
function rate(times, values, factor) {
  let from = 0;
  return times.map((time, index) => {
    while (from < index - 1 && time - times[from] > RATE_S) from += 1;
    const seconds = time - times[from];
    return index && seconds >= RATE_S / 2 ? factor * Math.max(0, values[index] - values[from]) / seconds : null;
  });
}

function showCharts() {
  const h = state.history, t = h.time_s;
  const line = (label, stroke, more) => ({ label, stroke, width: 1.5, ...more });
  charts.speed.set([line("tokens/s", "--blue")], [t, h.tokens_per_s]);
  charts.spread.set([line("spread", "--blue")], [t, h.spread.map((n) => n === null ? null : 100 * n)]);
  charts.rounds.set([line("swapped", "--green"), line("half", "--blue", { dash: [6, 3] }), line("solo", "--red", { dash: [2, 3] })],
    [t, rate(t, h.swaps, 60), rate(t, h.halves, 60), rate(t, h.alone, 60)]);
  charts.bytes.set([line("sent", "--blue")], [t, rate(t, h.bytes_sent, 1 / 1048576)]);
  const names = Object.keys(h.losses).sort();
  const few = state.peers.size <= MANY_PEERS;
  const own = names.map((name, index) => line(short(name), listColour(index)));
  const bounds = few ? [] : [line("lowest", "--faint"), line("mean", "--blue", { width: 2 }), line("highest", "--faint")];
  const range = few ? [] : [h.loss_lowest, h.loss, h.loss_highest];
  if (names.length || !few) charts.loss.set([...bounds, ...own], [t, ...range, ...names.map((name) => h.losses[name])]);
  text("n-loss", few ? `one line for each ${state.head.stages.length ? "head" : `of ${names.length} peers`}` : `lowest, mean and highest of ${state.peers.size} peers${names.length ? `, and ${names.length} that match the search` : "; search for peers to see their lines"}`);
}

function showHead() {
  const { totals, notices, run } = state.head;
  if ($("run").textContent !== run) { text("run", run); document.title = `${run} – noloco swarm`; }
  const told = notices.length ? notices : [{ level: "well", text: "All is well." }];
  const key = JSON.stringify(told);
  if ($("notices").dataset.key !== key) {
    $("notices").dataset.key = key;
    $("notices").replaceChildren(...told.map((notice) => {
      const item = document.createElement("li");
      item.className = notice.level;
      item.textContent = notice.text;
      return item;
    }));
  }
  text("t-alive", String(totals.alive + totals.silent));
  text("t-alive-sub", ["silent", "leaving", "left", "gone"].filter((name) => totals[name]).map((name) => `${totals[name]} ${name}`).join(", "));
  text("t-loss", loss(totals.loss));
  text("t-loss-sub", totals.loss === null ? "" : `${loss(totals.loss_lowest)} to ${loss(totals.loss_highest)}`);
  text("t-speed", count(totals.tokens_per_s));
  text("t-speed-sub", `${bytes(totals.bytes_sent)} sent in total`);
  text("t-progress", totals.progress === null ? "–" : `${(100 * totals.progress).toFixed(1)} %`);
  text("t-progress-sub", [totals.round === null ? "" : `round ${totals.round}`, left(totals.progress)].filter(Boolean).join(", "));
  text("t-spread", share(totals.spread));
  text("t-spread-sub", totals.spread === null ? "needs comparable sketches from two peers" : `estimated, ${totals.spread_peers} peers`);
  const lately = totals.lately, rounds = lately.swaps + lately.halves + lately.alone;
  text("t-alone", rounds ? `${Math.round(100 * lately.alone / rounds)} %` : "–");
  const causes = Object.keys(totals.alone_by_cause).filter((cause) => lately[cause]).sort((a, b) => lately[b] - lately[a]);
  text("t-alone-sub", causes.map((cause) => `${lately[cause]} ${cause.replace("_", " ")}`).join(", ") || (rounds ? `of ${rounds} rounds` : ""));
}

// Estimates the time left on the schedule from the progress in the last ten minutes.
function left(progress) {
  const h = state.history;
  if (!h || progress === null || progress >= 1) return "";
  let index = h.time_s.length - 1;
  while (index > 0 && now() - h.time_s[index] < 600) index -= 1;
  const grown = index >= 0 ? progress - h.progress[index] : 0, seconds = now() - h.time_s[index];
  return grown > 0 && seconds > 60 ? `about ${span((1 - progress) * seconds / grown)} left` : "";
}

function showStages() {
  const stages = state.head.stages, staged = stages.length > 0;
  document.body.classList.toggle("staged", staged);
  text("h-speed", `Tokens per second, all ${staged ? "heads" : "peers"}`);
  text("h-spread", `Spread ${staged ? "in the widest stage" : "of the replicas"}, % of their norm`);
  $("stages").replaceChildren(...stages.map((stage) => {
    const row = document.createElement("tr");
    row.className = stage.peers ? "" : "empty";
    STAGE_CELLS.forEach((show, place) => {
      const cell = row.insertCell();
      cell.className = place ? "" : "text";
      cell.textContent = String(show(stage));
    });
    return row;
  }));
}

function showGraph() {
  const peers = [...state.peers.values()].map((peer) => ({ id: peer.peer_id, ...peer }));
  peers.sort((a, b) => a.id < b.id ? -1 : 1);
  graph.draw(peers, state.head.meetings, now());
  if (state.head.stages.length) paths.draw(peers, state.head.stages.length);
}

function chosen() {
  const words = state.words.toLowerCase();
  const matches = (peer) => !words || [peer.peer_id, peer.name, peer.state, peer.paused_by, peer.health, peer.software, peer.reachability].some((part) => part.toLowerCase().includes(words));
  const key = COLUMNS.find((column) => column.name === state.sort).key;
  const keyed = [...state.peers.values()].filter(matches).map((peer) => [key(peer), peer]);
  const sign = state.down ? -1 : 1;
  keyed.sort(([a], [b]) => a === b ? 0 : a === null ? 1 : b === null ? -1 : a < b ? -sign : sign);
  return keyed.map(([, peer]) => peer);
}

function showTable() {
  const peers = chosen(), pages = Math.max(1, Math.ceil(peers.length / PAGE));
  state.page = Math.min(state.page, pages - 1);
  const visible = peers.slice(state.page * PAGE, (state.page + 1) * PAGE), body = $("rows");
  while (body.rows.length > visible.length) body.deleteRow(-1);
  while (body.rows.length < visible.length) {
    const row = body.insertRow();
    for (const column of COLUMNS) row.insertCell().className = classes(column);
  }
  visible.forEach((peer, index) => {
    const row = body.rows[index];
    if (row.dataset.health !== peer.health) row.dataset.health = peer.health;
    if (row.dataset.peer !== peer.peer_id) { row.dataset.peer = peer.peer_id; row.cells[0].title = peer.peer_id; }
    COLUMNS.forEach((column, place) => {
      const value = String(column.show(peer));
      if (row.cells[place].textContent !== value) row.cells[place].textContent = value;
    });
  });
  text("shown", state.words ? `${peers.length} of ${state.peers.size} match` : `${peers.length} peers`);
  document.body.classList.toggle("named", [...state.peers.values()].some((peer) => peer.name));
  $("pages").hidden = pages === 1;
  text("page", `page ${state.page + 1} of ${pages}`);
  $("previous").disabled = state.page === 0;
  $("next").disabled = state.page === pages - 1;
}

function makeHead() {
  for (const column of COLUMNS) {
    const cell = document.createElement("th"), button = document.createElement("button");
    cell.scope = "col";
    cell.className = classes(column);
    button.type = "button";
    button.textContent = column.name;
    button.onclick = () => { state.down = state.sort === column.name && !state.down; state.sort = column.name; markHead(); showTable(); };
    cell.append(button);
    $("head").append(cell);
  }
  markHead();
}

function markHead() {
  COLUMNS.forEach((column, index) => {
    const cell = $("head").cells[index];
    if (column.name === state.sort) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
}

const number = (n) => n === 0 ? "0" : Math.abs(n) >= 1000 ? count(n) : String(+n.toPrecision(3));
charts = Object.fromEntries(["loss", "speed", "spread", "rounds", "bytes"].map((name) => [name, new Chart(`c-${name}`, number)]));
graph = new Graph("graph");
paths = new Paths("paths");
let searching;
$("search").oninput = (event) => {
  state.words = event.target.value.trim();
  state.page = 0;
  showTable();
  clearTimeout(searching);
  if (state.peers.size > MANY_PEERS) searching = setTimeout(loadCurves, 400);
};
$("previous").onclick = () => { state.page -= 1; showTable(); };
$("next").onclick = () => { state.page += 1; showTable(); };
poll();
