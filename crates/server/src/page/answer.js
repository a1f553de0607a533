"use strict";
// The path under v1/ by which models are asked first.
const API = "{{api}}";
const CHAT = API.startsWith("chat");
// The models that turned out to have no chat template.
const WITHOUT_TEMPLATE = new Set();
const EXAMPLES = ["Write a short story about a lonely owl in the snow who waits for the rain.",
  "What is the capital of France?", "Tell me about a small boat and a big storm."];
// Where a token can come from, with a name and an explanation.
const SOURCES = {
  target: ["the model itself", "The model’s own token; nothing was drafted at its place"],
  correction: ["a correction", "The model’s own token, in place of a draft token that it rejected"],
  model: ["a draft model", "Drafted by a small model or a head, and accepted"],
  own: ["this text", "Drafted from what this conversation contained before, and accepted"],
  pool: ["earlier answers", "Drafted from answers to other requests, and accepted"],
  recycled: ["near misses", "Drafted from what the model found likely after the same token before, and accepted"],
  lookahead: ["guesses ahead", "Drafted from what the model wrote after guessed tokens, and accepted"],
  grammar: ["the grammar", "The only token that the format allows"],
  lossy: ["not the model’s own", "Let stand by the lossy rule of the settings, in place of the model’s own token"],
  prediction: ["the prediction", "Drafted from the output that the request predicts, and accepted"],
};
// Those that nothing on this page asks for, so that the legend has them only if they are seen.
const RARE = ["lookahead", "grammar", "prediction", "lossy"];

const $ = (id) => document.getElementById(id);

/** An element with properties and children; texts become text nodes. */
function el(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
const seconds = (milliseconds) => `${(milliseconds / 1000).toFixed(2)} s`;

// ---- The server ------------------------------------------------------------------------------

/** What went wrong, for people; `kind` says what they can do about it: "key", "again" or nothing. */
class Problem extends Error {
  constructor(title, detail, kind) {
    super(detail);
    Object.assign(this, { title, kind });
  }
}

const unreachable = () => new Problem("The server cannot be reached.", "Is it still running? Nothing answers at this address.", "again");

async function problem(response) {
  const { error } = await response.json().catch(() => ({}));
  const detail = error?.message ?? `It answered with status ${response.status}.`;
  const wait = response.headers.get("retry-after");
  if (error?.code === "model_unavailable") return new Problem("The model cannot be loaded.", detail, "again");
  if (error?.param === "messages" && detail.includes("no chat template")) return new Problem("The model does not chat.", detail, "continue");
  switch (response.status) {
    case 401: return new Problem("The server asks for an API key.", detail, "key");
    case 404: return new Problem("The server does not have this model.", detail);
    case 429: return new Problem("The server is busy.", `${detail}${wait ? ` – try again in ${wait} s` : ""}`, "again");
    case 503: return new Problem("The server does not take this request now.", detail, "again");
    case 400: case 413: return new Problem("The server does not accept this request.", detail);
    default: return new Problem("The server failed.", detail, "again");
  }
}

async function call(path, options = {}) {
  // The router says that a model is being loaded only to clients that accept this type.
  const headers = { accept: "text/event-stream, */*" };
  if ($("key").value) headers.authorization = `Bearer ${$("key").value}`;
  if (options.body) headers["content-type"] = "application/json";
  const response = await fetch(`v1/${path}`, { ...options, headers }).catch((error) => {
    throw options.signal?.aborted ? error : unreachable();
  });
  if (!response.ok) throw await problem(response);
  return response;
}

/** The response to a request for an answer. A model without a chat template continues the text. */
async function ask(body, signal) {
  const send = (path, body) => call(path, { method: "POST", body: JSON.stringify(body), signal });
  if (CHAT && !WITHOUT_TEMPLATE.has(body.model)) {
    try {
      return await send(API, body);
    } catch (error) {
      if (error.kind !== "continue") throw error;
      WITHOUT_TEMPLATE.add(body.model);
    }
  }
  const { messages, ...rest } = body;
  const prompt = messages.reduce((text, { role, content }) => text + (text && role === "user" ? "\n\n" : "") + content, "");
  return send("completions", { ...rest, prompt });
}

/** The chunks of a streamed answer, and what is said while its model is being loaded. */
async function* stream(body, signal) {
  const response = await ask(body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let buffer = ""; ;) {
    const { done, value } = await reader.read().catch((error) => {
      if (signal.aborted) throw error;
      return { done: true };
    });
    if (done) throw new Problem("The connection broke.", "The answer is not complete.", "again");
    const events = (buffer + value).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      if (event.startsWith(": ")) yield { choices: [], waiting: event.slice(": ".length) };
      if (!event.startsWith("data: ")) continue;
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Problem("The server could not finish the answer.", chunk.error.message, "again");
      yield chunk;
    }
  }
}

/** A request for an answer to `messages`, as the settings have it. */
function request(messages, more = {}) {
  const body = { stream: true, stream_options: { include_usage: true, include_speculation: true } };
  if ($("model").value) body.model = $("model").value;
  for (const field of ["temperature", "seed", "max_tokens", "spec_length"]) {
    if ($(field).value !== "") body[field] = Number($(field).value);
  }
  if ($("acceptance").value) body.acceptance = $("acceptance").value;
  body.seed ??= Math.floor(Math.random() * 2 ** 31);
  const system = $("system").value.trim();
  body.messages = system ? [{ role: "system", content: system }, ...messages] : messages;
  return { ...body, ...more };
}

// ---- An answer -------------------------------------------------------------------------------

/** The round of each token that is shown. */
const roundOf = new WeakMap();

/** An answer as it arrives: its text and its tokens on the page, and what is counted of them. */
class Answer {
  /** With `prose`, its text is shown as Markdown, too. */
  constructor(label, prose) {
    this.prose = prose ? el("div", { className: "prose" }) : null;
    this.text = el("div", { className: "tokens" });
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", `${label}. Arrow keys go from token to token.`);
    this.foot = el("p", { className: "foot soft" });
    this.root = el("article", { className: "answer" }, ...(prose ? [this.prose] : []), this.text, this.foot);
    this.root.setAttribute("aria-label", label);
    this.clear();
  }

  /** Forgets what it shows, but not what arrived. */
  clear() {
    Object.assign(this, { rounds: [], tokens: 0, drafted: 0, accepted: 0, positions: [], sources: {}, first: null, last: null });
    this.text.replaceChildren();
  }

  /** Asks for an answer and shows it; `update` makes each change of it. Its times are in milliseconds from the request. */
  async run(body, signal, update) {
    const { seed, temperature } = body;
    Object.assign(this, { content: "", thoughts: "", continues: false, finish: null, arrivals: [], seed, temperature, total: null, waiting: null });
    this.clear();
    this.root.setAttribute("aria-busy", "true");
    this.started = performance.now();
    try {
      for await (const chunk of stream(body, signal)) {
        update(() => this.take(performance.now() - this.started, chunk));
      }
    } finally {
      update(() => { this.total = performance.now() - this.started; });
      // What is announced now is whole.
      this.root.setAttribute("aria-busy", "false");
    }
  }

  take(at, chunk) {
    this.waiting = chunk.waiting;
    for (const choice of chunk.choices) {
      this.continues ||= choice.text !== undefined;
      this.content += choice.text ?? choice.delta?.content ?? "";
      this.thoughts += choice.delta?.reasoning_content ?? "";
      this.finish = choice.finish_reason ?? this.finish;
      if (choice.speculation) {
        this.arrivals.push([at, choice.speculation]);
        this.show(at, choice.speculation);
      }
    }
  }

  /** Shows what has arrived as Markdown; a text that a model only continues is shown as it is. */
  draw() {
    const open = this.total === null;
    const thinking = ["details", { class: "thoughts" }, ["summary", {}, "Thoughts"], ...markdown(this.thoughts, open && !this.content)];
    const text = this.continues ? [["p", { class: "as-is" }, this.content]] : markdown(this.content, open);
    morph(this.prose, this.thoughts ? [thinking, ...text] : text);
  }

  show(at, rounds) {
    this.first ??= { at, tokens: rounds.reduce((sum, round) => sum + round.tokens.length, 0) };
    this.last = at;
    for (const { draft, tokens } of rounds) {
      const round = { draft, tokens, number: this.rounds.push(null), spans: [] };
      this.rounds[round.number - 1] = round;
      this.tokens += tokens.length;
      this.count(draft);
      for (const { text, source, lossy } of tokens) {
        for (const kind of lossy ? [source, "lossy"] : [source]) this.sources[kind] = (this.sources[kind] ?? 0) + 1;
        // Special tokens, and all but the last of a character that is several, add nothing to the text.
        if (text) round.spans.push(this.span(text, lossy ? `${source} lossy` : source, round));
      }
    }
  }

  /** A token; the space before a word is not coloured. */
  span(text, source, round) {
    const word = text.trimStart() || text;
    const span = el("span", { className: `t ${source}`, textContent: word, tabIndex: this.text.firstElementChild ? -1 : 0 });
    this.text.append(text.slice(0, -word.length), span);
    roundOf.set(span, round);
    return span;
  }

  /** Counts a draft by its depths: of siblings, one can be accepted. */
  count(draft) {
    const depths = [];
    draft.forEach(({ parent, accepted }, i) => {
      const depth = (depths[i] = parent === null ? 0 : depths[parent] + 1);
      const position = (this.positions[depth] ??= { drafts: 0, accepted: 0 });
      if (depths.indexOf(depth) === i) position.drafts += 1;
      position.accepted += accepted;
      this.accepted += accepted;
    });
    this.drafted += draft.length;
  }

  /** Tokens a second after the first ones. */
  get speed() {
    const time = this.first ? this.last - this.first.at : 0;
    return time > 0 ? ((this.tokens - this.first.tokens) * 1000) / time : null;
  }

  get summary() {
    if (this.waiting && this.total === null) return this.waiting;
    const parts = [`${this.tokens} tokens in ${this.rounds.length} rounds`];
    if (this.speed) parts.push(`${this.speed.toFixed(1)} a second`);
    if (this.first) parts.push(`the first after ${seconds(this.first.at)}`);
    if (this.drafted) parts.push(`${this.accepted} of ${this.drafted} draft tokens accepted`);
    if (this.finish === "length") parts.push("cut off at the maximum");
    if (this.total !== null && !this.finish) parts.push("stopped");
    if (this.temperature !== undefined) parts.push(`temperature\u00a0${this.temperature}`);
    return [...parts, `seed\u00a0${this.seed}`].join(" · ");
  }
}

// ---- The figures beside it -------------------------------------------------------------------

const counts = {};
for (const [source, [name, title]] of Object.entries(SOURCES)) {
  counts[source] = el("span");
  $("legend").append(el("li", { title, hidden: RARE.includes(source) }, el("span", { className: `t ${source}`, textContent: name }), counts[source]));
}

/** Bars: how often the draft token at each position was accepted where there was one. */
function chart(positions) {
  const [width, height, floor] = [240, 84, 70];
  const places = Array.from({ length: Math.max(positions.length, 8) }, (_, i) => positions[i] ?? { drafts: 0, accepted: 0 });
  const step = width / places.length;
  const parts = places.flatMap(({ drafts, accepted }, i) => {
    const [x, bar] = [i * step + 2, drafts && ((floor - 4) * accepted) / drafts];
    return [
      svg("rect", { class: "track", x, y: 4, width: step - 4, height: floor - 4, rx: 2 }),
      svg("rect", { class: "bar", x, y: floor - bar, width: step - 4, height: bar, rx: 2 }),
      svg("text", { x: x + step / 2 - 2, y: height - 3 }, `${i + 1}`),
    ];
  });
  const words = positions.map(({ drafts, accepted }, i) => `position ${i + 1}: ${accepted} of ${drafts}`);
  const label = words.length ? `Accepted, ${words.join(", ")}` : "Nothing was drafted yet";
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, svg("title", {}, label), ...parts);
}

/** Shows an answer's figures; called as often as one likes. */
function figures(answer) {
  figures.answer = answer;
  figures.pending ??= setTimeout(() => {
    const { speed, rounds, tokens, drafted, accepted, positions, sources } = figures.answer;
    figures.pending = null;
    $("speed").textContent = speed ? speed.toFixed(1) : "–";
    $("length").textContent = rounds.length ? (tokens / rounds.length).toFixed(2) : "–";
    $("drafted").textContent = drafted;
    $("accepted").textContent = percent(accepted, drafted);
    for (const [source, count] of Object.entries(counts)) {
      count.textContent = sources[source] ?? 0;
      count.parentElement.hidden = RARE.includes(source) && !sources[source];
    }
    $("chart").replaceChildren(chart(positions));
  }, 80);
}
$("chart").replaceChildren(chart([]));

// ---- A round, on hover and focus -------------------------------------------------------------

const visible = (token) => token.replace(/^ /, "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");

/** What became of draft token `i`. A token behind a rejected one is not looked at. */
function fate({ draft, tokens }, i) {
  const { parent, accepted } = draft[i];
  if (accepted) return "accepted";
  const reached = parent === null || draft[parent].accepted;
  const path = draft.filter((node) => node.accepted).length;
  const depth = (node) => (node === null ? 0 : depth(draft[node].parent) + 1);
  // Where the text ends within a draft, nothing is decided about what comes after.
  return reached && (depth(parent) < path || tokens.length > path) ? "rejected" : "unseen";
}

const SIGNS = { accepted: ["✓", "accepted"], rejected: ["✗", "rejected"], unseen: ["·", "not looked at"] };

/** The draft after `parent`: what has one child stays on its line. */
function draftTree(round, parent) {
  const nodes = round.draft.flatMap((node, i) => (node.parent === parent ? [i] : []));
  const branches = nodes.map((i) => {
    const { token, source } = round.draft[i];
    const [sign, word] = SIGNS[fate(round, i)];
    const chip = el("span", { className: `chip ${source} ${fate(round, i)}` }, `${sign} ${visible(token)}`, el("span", { className: "only-read" }, ` ${word}, `));
    return [chip, ...draftTree(round, i)];
  });
  if (branches.length < 2) return branches.flat();
  return [el("ul", {}, ...branches.map((branch) => el("li", {}, ...branch)))];
}

function describe(round) {
  const accepted = round.draft.filter((node) => node.accepted).length;
  const came = round.tokens.map(({ token, source, lossy }) => el("span", { className: `chip ${source}${lossy ? " lossy" : ""}` }, visible(token)));
  const own = round.tokens[accepted]?.source;
  const title = round.draft.length ? `${accepted} of ${round.draft.length} draft tokens accepted` : "nothing was drafted";
  const last = { correction: "the model’s correction", target: "the model’s own next token" }[own] ?? "the text ends";
  return [
    el("strong", {}, `Round ${round.number}: ${title}`),
    ...(round.draft.length ? [el("div", {}, ...draftTree(round, null))] : []),
    el("div", { className: "soft" }, accepted ? `These stay, then ${last}:` : `What came was ${last}:`),
    el("div", {}, ...came),
  ];
}

let shown = null;

/** Whether there was a round to hide. */
function hideRound() {
  if (!shown) return false;
  shown.round.spans.forEach((span) => span.classList.remove("same"));
  shown.token.removeAttribute("aria-describedby");
  shown = null;
  $("round").hidden = true;
  return true;
}

function showRound({ target }) {
  const round = roundOf.get(target);
  hideRound();
  if (!round) return;
  shown = { round, token: target };
  round.spans.forEach((span) => span.classList.add("same"));
  target.setAttribute("aria-describedby", "round");
  $("round").replaceChildren(...describe(round));
  $("round").hidden = false;
  placeRound();
}

/** Puts the round above its token, or below where there is no room, but within the window. */
function placeRound() {
  if (!shown) return;
  const tip = $("round");
  const at = shown.token.getClientRects()[0];
  const within = (place, size, room) => `${Math.max(8, Math.min(place, room - size - 8))}px`;
  const above = at.top - tip.offsetHeight - 6;
  tip.style.left = within(at.left, tip.offsetWidth, innerWidth);
  tip.style.top = within(above > 0 ? above : at.bottom + 6, tip.offsetHeight, innerHeight);
}

document.addEventListener("pointerover", showRound);
document.addEventListener("focusin", showRound);
document.addEventListener("focusout", hideRound);
document.addEventListener("scroll", placeRound, { passive: true });

/** Arrow keys, Home and End go from token to token; only one of an answer is a tab stop. */
document.addEventListener("keydown", (event) => {
  const token = event.target;
  if (!roundOf.has(token)) return;
  const { firstElementChild: first, lastElementChild: last } = token.parentElement;
  const next = { ArrowLeft: token.previousElementSibling, ArrowRight: token.nextElementSibling, Home: first, End: last }[event.key];
  if (!next) return;
  event.preventDefault();
  token.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});
