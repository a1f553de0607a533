// ---- Problems --------------------------------------------------------------------------------

/** What is shown of an error; `again` is called if the user wants to try once more. */
function notice(error, again) {
  const { title = "Something went wrong on this page.", message, kind } = error;
  const box = el("div", { className: "problem" }, el("strong", {}, title), ` ${message}`);
  box.setAttribute("role", "alert");
  const button = (text, act) => box.append(el("br"), el("button", { type: "button", textContent: text, onclick: act }));
  if (kind === "key") button("Enter the key", () => { $("settings").open = true; $("key").focus(); });
  if (kind && again) button("Try again", () => { box.remove(); again(); });
  return box;
}

// ---- The chat --------------------------------------------------------------------------------

let messages = [];
let running = null;

function welcome() {
  const ask = (text) => el("button", { type: "button", textContent: text, onclick: () => { $("question").value = text; $("ask").requestSubmit(); } });
  const kind = CHAT ? "" : " This model has no chat template: it continues your text.";
  $("log").replaceChildren(el("div", { className: "welcome" },
    el("p", {}, "Ask the model, and see drafts being accepted."),
    el("p", { className: "soft" }, "A draft guesses several tokens, the model checks them in one round, and those that it would have written itself stay. “Tokens” shows where each token of an answer came from. Point at one, or tab to it and use the arrow keys, to see its round." + kind),
    ...EXAMPLES.map(ask)));
}

/** Keeps the end of the conversation in view, above the question, if it is. */
function follow(change) {
  const below = () => $("log").getBoundingClientRect().bottom + $("ask").offsetHeight - innerHeight;
  const inView = below() < 40;
  change();
  if (inView && below() > 0) scrollBy(0, below());
}

function busy(is) {
  const [hide, show] = is ? ["send", "stop"] : ["stop", "send"];
  const focused = document.activeElement === $(hide);
  $(hide).hidden = true;
  $(show).hidden = false;
  if (focused) $(show).focus();
}

async function answer() {
  const reply = new Answer("Answer", true);
  const abort = (running = new AbortController());
  const asked = messages;
  busy(true);
  follow(() => $("log").append(reply.root));
  try {
    await reply.run(request(asked), abort.signal, (change) => follow(() => {
      change();
      if (messages !== asked) return;
      reply.draw();
      reply.foot.textContent = reply.summary;
      figures(reply);
    }));
  } catch (error) {
    if (!abort.signal.aborted) {
      if (!reply.tokens) reply.root.remove();
      if (messages === asked) follow(() => $("log").append(notice(error, () => { reply.root.remove(); answer(); })));
      return;
    }
  } finally {
    if (running === abort) {
      running = null;
      busy(false);
    }
  }
  if (messages === asked && reply.content) messages.push({ role: "assistant", content: reply.content });
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = $("question").value.trim();
  if (!content || running) return;
  $("question").value = "";
  $("log").querySelector(".welcome")?.remove();
  $("log").querySelectorAll(".problem").forEach((box) => box.remove());
  // A question that was never answered is asked anew.
  if (messages.at(-1)?.role === "user") messages.pop();
  messages.push({ role: "user", content });
  follow(() => $("log").append(el("div", { className: "user", textContent: content })));
  answer();
});
/** Whether a key belongs to an input method; Safari says so of the last one by the code 229 alone. */
const composes = (event) => event.isComposing || event.keyCode === 229;
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !composes(event)) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
// Escape hides what is shown of a round first, but in the question it always stops.
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || composes(event)) return;
  if (hideRound() && event.target !== $("question")) return;
  running?.abort();
  race?.abort();
});
$("stop").addEventListener("click", () => { running?.abort(); $("question").focus(); });
$("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  welcome();
  $("question").focus();
});

/** Shows answers as tokens, or as text. */
function showTokens() {
  hideRound();
  $("log").classList.toggle("as-tokens", $("tokens").checked);
}
$("tokens").addEventListener("change", showTokens);

/** Copies the code below a button, also where browsers trust a page too little for a clipboard. */
async function copyCode(button) {
  const code = button.closest(".code").querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch {
    getSelection().selectAllChildren(code);
    if (!document.execCommand("copy")) return;
    getSelection().removeAllRanges();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}
$("log").addEventListener("click", ({ target }) => {
  if (target.matches(".copy")) copyCode(target);
});

// The temperature stands in the chat and in the race; both show and change the same.
const temperatures = [...document.querySelectorAll(".temperature input")];
for (const input of temperatures) {
  input.addEventListener("input", () => temperatures.forEach((other) => { if (other !== input) other.value = input.value; }));
}

// ---- The race --------------------------------------------------------------------------------

const LANES = [["With speculation", {}], ["Without", { spec_length: 0 }]].map(([name, fields]) => {
  const lane = { name, fields, answer: new Answer(name, false), clock: el("p", { className: "clock", textContent: seconds(0) }) };
  $("lanes").append(el("div", {}, el("h3", { textContent: name }), lane.clock, lane.answer.root));
  return lane;
});
let race = null;

/** Calls `draw` before each frame while it returns true. */
function animate(draw) {
  const frame = () => draw() && requestAnimationFrame(frame);
  requestAnimationFrame(frame);
}

/** Requests of different salts share nothing that would make one of them faster. */
const salt = () => ({ cache_salt: crypto.getRandomValues(new Uint32Array(4)).join("-") });

/** Wakes the machine: what comes first after a rest is slower. */
async function warmUp(signal) {
  const body = request([{ role: "user", content: "Hello" }], { max_tokens: 16, ...salt() });
  for await (const chunk of stream(body, signal)) void chunk;
}

async function drive(lane, body, signal) {
  const { answer, clock } = lane;
  const run = answer.run({ ...body, ...lane.fields, ...salt() }, signal, (change) => {
    change();
    answer.foot.textContent = answer.summary;
  });
  animate(() => {
    clock.textContent = seconds(answer.total ?? performance.now() - answer.started);
    return answer.total === null;
  });
  await run;
}

function verdict([fast, plain]) {
  const names = ({ answer }) => answer.arrivals.flatMap(([, rounds]) => rounds.flatMap(({ tokens }) => tokens.map(({ token }) => token)));
  const [a, b] = [names(fast), names(plain)];
  const differs = a.findIndex((token, i) => token !== b[i]);
  const equal = differs < 0 && a.length === b.length;
  const words = equal ? "The texts are equal, token for token." : `The texts differ from token ${(differs < 0 ? a.length : differs) + 1} on.`;
  const ratio = plain.answer.total / fast.answer.total;
  $("verdict").replaceChildren(el("strong", {}, `${ratio.toFixed(2)} × `), ratio >= 1 ? "as fast with speculation. " : "as fast with speculation: it did not pay here. ", words);
}

$("start").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (race || !$("prompt").value.trim()) return;
  const abort = (race = new AbortController());
  $("go").disabled = true;
  $("halt").hidden = false;
  $("replay").hidden = true;
  $("verdict").replaceChildren("Racing …");
  for (const lane of LANES) {
    lane.answer.clear();
    lane.answer.foot.textContent = "";
    lane.clock.textContent = seconds(0);
  }
  try {
    const body = request([{ role: "user", content: $("prompt").value }]);
    const atOnce = new FormData($("start")).get("when") === "at once";
    for (const lanes of atOnce ? [LANES] : LANES.map((lane) => [lane])) {
      await warmUp(abort.signal);
      await Promise.all(lanes.map((lane) => drive(lane, body, abort.signal)));
    }
    verdict(LANES);
    figures(LANES[0].answer);
    $("replay").hidden = false;
  } catch (error) {
    $("verdict").replaceChildren(abort.signal.aborted ? "Stopped." : notice(error, () => $("start").requestSubmit()));
    abort.abort();
  }
  race = null;
  $("go").disabled = false;
  $("halt").hidden = true;
});
$("halt").addEventListener("click", () => race?.abort());

let replays = null;

/** Shows both runs again at their measured times, as if they had started together. */
$("replay").addEventListener("click", () => {
  const start = performance.now();
  const mine = (replays = LANES.map(({ answer, clock }) => {
    answer.clear();
    return { answer, clock, left: [...answer.arrivals] };
  }));
  animate(() => {
    // A later replay or a race has the lanes.
    if (replays !== mine || race) return false;
    const now = performance.now() - start;
    for (const { answer, clock, left } of mine) {
      while (left.length && left[0][0] <= now) answer.show(...left.shift());
      clock.textContent = seconds(Math.min(now, answer.total));
    }
    return mine.some(({ answer, left }) => left.length || now < answer.total);
  });
});

// ---- Tabs and models -------------------------------------------------------------------------

const tabs = [...document.querySelectorAll("[role=tab]")];

function open(tab) {
  for (const other of tabs) {
    other.setAttribute("aria-selected", other === tab);
    other.tabIndex = other === tab ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = other !== tab;
  }
  hideRound();
}
tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => open(tab));
  tab.addEventListener("keydown", ({ key }) => {
    if (key !== "ArrowLeft" && key !== "ArrowRight") return;
    const other = tabs[(i + 1) % tabs.length];
    open(other);
    other.focus();
  });
});

async function models() {
  const list = await call("models").then((response) => response.json());
  const names = list.data.map(({ id }) => id);
  const chosen = $("model").value || new URLSearchParams(location.search).get("model");
  $("model").replaceChildren(...names.map((name) => el("option", { value: name, textContent: name })));
  if (names.includes(chosen)) $("model").value = chosen;
  $("model").hidden = names.length < 2;
  $("model-name").textContent = names.length < 2 ? names.join() : "";
}

function start() {
  $("log").querySelectorAll(".problem").forEach((box) => box.remove());
  models().catch((error) => $("log").append(notice(error, start)));
}
$("key").addEventListener("change", start);
if (matchMedia("(max-width: 820px)").matches) $("settings").open = false;
// Browsers may remember it.
showTokens();
temperatures[1].value = temperatures[0].value;
welcome();
start();
