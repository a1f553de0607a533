// ---- Markdown --------------------------------------------------------------------------------
// What models write of CommonMark, and tables. A node is a text, or [tag, attributes, ...children]. Texts are not
// trusted: no other elements and attributes are made than those that stand here, and no text is read as markup of HTML.
// `open` says that the text goes on: what its last characters mean may not be known yet. They are held back then, and
// marks that will be closed are taken as closed, so that nothing which is shown changes its look later.

const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})(?:[-+*]|(\d{1,9})[.)])(?:[ \t]+|$)/;
// Of a line without spaces at its end.
const DELIMITERS = /^ {0,3}\|?\s*:?-+:?(\s*\|\s*:?-+:?)*\s*\|?$/;
// Quotes and lists within each other, and emphasis; what is deeper is text.
const MAX_DEPTH = 16;
// A last line that may become another block than it looks like.
const UNDECIDED_LINE = /^\s*([-+*_]{1,3}|\d{1,9}[.)]?|#{1,6}|>+|`{1,2}|~{1,2})$/;
// Last characters that may become marks.
const UNDECIDED_MARKS = /([*_~`\\]+|!?\[[^\]\n]{0,80}\]?|(?<!\S)!)$/;
// Where they are looked for.
const MAX_UNDECIDED = 200;

/** The nodes of a text. Those at the top have the text that they were made of, as `raw`. */
function markdown(text, open = false) {
  const lines = text.split(/\r?\n/);
  // What follows an empty last line decides whether it ends a paragraph.
  if (open && (lines.at(-1) === "" || UNDECIDED_LINE.test(lines.at(-1)))) lines.pop();
  return blocks(lines, open, 0);
}

function blocks(lines, open, depth) {
  const nodes = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const readers = depth < MAX_DEPTH ? [fence, heading, rule, quote, list, table, paragraph] : [paragraph];
    let found;
    for (const read of readers) {
      if ((found = read(lines, at, open, depth))) break;
    }
    const last = open && found.end >= lines.length;
    found.node.raw = `${last ? "…" : ""}${lines.slice(at, found.end).join("\n")}`;
    nodes.push(found.node);
    at = found.end;
  }
  return nodes;
}

const indent = (line) => line.match(/^[ \t]*/)[0].replaceAll("\t", "    ").length;

/** The line without the first `width` columns of its indentation. */
function outdent(line, width) {
  let [at, column] = [0, 0];
  for (; column < width && /[ \t]/.test(line[at] ?? ""); at += 1) column += line[at] === "\t" ? 4 : 1;
  return " ".repeat(Math.max(0, column - width)) + line.slice(at);
}

const begins = (line) => [RULE, FENCE, HEADING, QUOTE, ITEM].some((block) => block.test(line));

function paragraph(lines, at, open, depth) {
  let end = at + 1;
  const isNext = (line) => depth < MAX_DEPTH && (begins(lines[line]) || table(lines, line, open));
  while (end < lines.length && lines[end].trim() && !isNext(end)) end += 1;
  return { node: ["p", {}, ...inline(lines.slice(at, end).join("\n").trim(), open && end === lines.length)], end };
}

function fence(lines, at, open) {
  const [, ticks, info] = FENCE.exec(lines[at]) ?? [];
  if (!ticks) return null;
  const closes = (line) => line.trim().length >= ticks.length && !line.trim().replaceAll(ticks[0], "");
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const body = lines.slice(at + 1, end).map((line) => outdent(line, indent(lines[at])));
  const last = body.at(-1)?.trim();
  // An empty line would be seen, and then filled or taken away.
  if (open && end === lines.length && last !== undefined && !last.replaceAll(ticks[0], "")) body.pop();
  const language = open && at + 1 === lines.length ? "" : info.trim().split(/\s/)[0];
  return { node: codeBlock(language, body.join("\n")), end: end + 1 };
}

const codeBlock = (language, code) => ["div", { class: "code" },
  ["div", { class: "head" }, ["span", {}, language], ["button", { type: "button", class: "copy" }, "Copy"]],
  ["pre", { tabindex: "0", role: "region", "aria-label": language ? `Code, ${language}` : "Code" }, ["code", {}, code]]];

/** The page has headings of two levels itself. */
function heading(lines, at, open) {
  const [, marks] = HEADING.exec(lines[at]) ?? [];
  if (!marks) return null;
  const text = lines[at].trim().slice(marks.length).trim();
  let length = text.length;
  while (text[length - 1] === "#") length -= 1;
  const bare = text.slice(0, length);
  const title = !bare || /\s$/.test(bare) ? bare.trim() : text;
  return { node: [`h${Math.min(marks.length + 2, 6)}`, {}, ...inline(title, open && at + 1 === lines.length)], end: at + 1 };
}

const rule = (lines, at) => (RULE.test(lines[at]) ? { node: ["hr", {}], end: at + 1 } : null);

function quote(lines, at, open, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  if (end === at) return null;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { node: ["blockquote", {}, ...blocks(inside, open && end === lines.length, depth + 1)], end };
}

/** The first line from `at` that has something in it, or the end. */
function skipBlank(lines, at) {
  while (at < lines.length && !lines[at].trim()) at += 1;
  return at;
}

/** An item's lines, without their indentation, and where they end. Two columns are enough to belong to it. */
function item(lines, at, [marker, before]) {
  const body = [lines[at].slice(marker.length)];
  const belongs = (line) => indent(line) >= before.length + 2;
  let end = at + 1;
  while (end < lines.length) {
    const next = skipBlank(lines, end);
    if (next > end) {
      if (next === lines.length || !belongs(lines[next])) break;
      body.push(...lines.slice(end, next).fill(""));
      end = next;
    }
    if (!belongs(lines[end]) && begins(lines[end])) break;
    body.push(outdent(lines[end], marker.length));
    end += 1;
  }
  return { body, end };
}

function list(lines, at, open, depth) {
  const kind = (line) => (RULE.test(line) ? null : ITEM.exec(line)?.[0].trim().at(-1));
  const first = kind(lines[at]);
  if (!first) return null;
  const items = [];
  let [end, loose] = [at, false];
  for (let next = at; next < lines.length && kind(lines[next]) === first; next = skipBlank(lines, end)) {
    loose ||= items.length > 0 && next > end;
    const { body, end: after } = item(lines, next, ITEM.exec(lines[next]));
    items.push(body);
    end = after;
  }
  const ordered = ITEM.exec(lines[at])[2];
  const children = items.map((body, i) => {
    const inside = blocks(body, open && end === lines.length && i + 1 === items.length, depth + 1);
    const tight = !loose && inside[0]?.[0] === "p";
    return ["li", {}, ...(tight ? [...inside[0].slice(2), ...inside.slice(1)] : inside)];
  });
  return { node: [ordered ? "ol" : "ul", ordered ? { start: `${Number(ordered)}` } : {}, ...children], end };
}

const cells = (line) => line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function table(lines, at, open) {
  const delimiters = lines[at + 1] ?? "";
  const head = cells(lines[at]);
  const whole = lines[at].includes("|") && delimiters.includes("|") && DELIMITERS.test(delimiters.trimEnd()) && cells(delimiters).length === head.length;
  const begun = open && at + 2 >= lines.length && /^ {0,3}\|/.test(lines[at]) && /^[\s|:-]*$/.test(delimiters);
  if (!whole && !begun) return null;
  let end = Math.min(at + 2, lines.length);
  while (end < lines.length && lines[end].trim() && !begins(lines[end])) end += 1;
  // Short rows are filled up: a table of a few characters could have a million cells.
  if (head.length * (end - at) > 50_000) return null;
  const sides = cells(delimiters).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  const row = (number, tag, attributes) => {
    const texts = cells(lines[number]);
    const goesOn = (i) => open && number + 1 === lines.length && i + 1 === texts.length;
    // A header without a text is none.
    const cell = (_, i) => [texts[i] ? tag : "td", { class: whole ? sides[i] : "left", ...(texts[i] ? attributes : {}) }, ...inline(texts[i] ?? "", goesOn(i))];
    return ["tr", {}, ...head.map(cell)];
  };
  const body = Array.from({ length: Math.max(0, end - at - 2) }, (_, i) => row(at + 2 + i, "td", {}));
  return { node: ["div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" },
    ["table", {}, ["thead", {}, row(at, "th", { scope: "col" })], ["tbody", {}, ...body]]], end };
}

// ---- Markdown within a line -------------------------------------------------------------------

// An address ends before marks of Chinese and Japanese sentences, too, and after 2,000 characters.
const SPECIAL = /\\[!-/:-@[-`{-~]|\\(?=\n)|`+|\*+|_+|~~|!?\[|<?\bhttps?:\/\/[^\s<>\u3000-\u303f\uff00-\uffef]{1,2000}>?/g;

/** The nodes of a text within a block; no links within links. */
function inline(text, open, linked = false) {
  const tail = Math.max(0, text.length - MAX_UNDECIDED);
  const source = open ? text.slice(0, tail) + text.slice(tail).replace(UNDECIDED_MARKS, "") : text;
  const parts = [];
  let ends = null;
  const closing = (at) => (ends ??= closings(source)).get(at) ?? -1;
  let at = 0;
  SPECIAL.lastIndex = 0;
  for (let found; (SPECIAL.lastIndex = at) <= source.length && (found = SPECIAL.exec(source));) {
    const [mark] = found;
    parts.push(source.slice(at, found.index));
    const read = { "\\": escaped, "`": codeSpan, "*": emphasis, _: emphasis, "~": emphasis, "!": link, "[": link }[mark[0]] ?? address;
    const { part, end } = read(source, found.index, mark, open, linked, closing);
    parts.push(part);
    at = end;
  }
  parts.push(source.slice(at));
  return joined(emphasized(parts, open));
}

const escaped = (source, at, mark) => ({ part: mark.slice(1), end: at + mark.length });

function codeSpan(source, at, mark, open) {
  const start = at + mark.length;
  let end = start;
  // The next run of as many backticks.
  for (const runs = /`+/g; ;) {
    runs.lastIndex = end;
    const run = runs.exec(source);
    if (!run) {
      if (!open) return { part: mark, end: start };
      return { part: ["code", {}, source.slice(start)], end: source.length };
    }
    end = run.index + run[0].length;
    if (run[0].length === mark.length) break;
  }
  const code = source.slice(start, end - mark.length).replaceAll("\n", " ");
  const padded = code.startsWith(" ") && code.endsWith(" ") && /[^ ]/.test(code);
  return { part: ["code", {}, padded ? code.slice(1, -1) : code], end };
}

/** Where the brackets of a text are closed, each by where it opens. */
function closings(source) {
  const ends = new Map();
  const opened = { "]": [], ")": [] };
  for (let i = 0; i < source.length; i += 1) {
    const c = source[i];
    if (c === "\\") i += 1;
    else if (c === "[") opened["]"].push(i);
    else if (c === "(") opened[")"].push(i);
    else if (opened[c]?.length) ends.set(opened[c].pop(), i);
  }
  return ends;
}

/** A link. A picture is one, too: the page loads nothing from elsewhere. */
function link(source, at, mark, open, linked, closing) {
  const literal = { part: mark, end: at + mark.length };
  const label = at + mark.length - 1;
  const middle = linked ? -1 : closing(label);
  if (middle < 0 || source[middle + 1] !== "(") return literal;
  const end = closing(middle + 1);
  // An address that is not whole is not shown, but what is too long for one is.
  const arriving = open && /^.{0,300}$/.test(source.slice(middle + 1));
  if (end < 0 && !arriving) return literal;
  const words = inline(source.slice(label + 1, middle), false, true);
  if (end < 0) return { part: ["span", {}, ...words], end: source.length };
  const [, bracketed, bare] = /^\s*(?:<([^<>]*)>|(\S*))/.exec(source.slice(middle + 2, end));
  return { part: anchor(bracketed ?? bare, words), end: end + 1 };
}

/** An address without words. What ends a sentence is not a part of it. */
function address(source, at, mark, open, linked) {
  const bracketed = mark.startsWith("<") && mark.endsWith(">");
  if (mark.startsWith("<") && !bracketed) return { part: "<", end: at + 1 };
  let url = bracketed ? mark.slice(1, -1) : mark.replace(/>$/, "");
  while (!bracketed && (/[.,;:!?'"*_~`\]]$/.test(url) || (url.endsWith(")") && url.split(")").length > url.split("(").length))) url = url.slice(0, -1);
  const end = at + (bracketed ? mark.length : url.length);
  return { part: linked ? url : anchor(url, [url]), end };
}

/** Words that lead to an address of the web or of a mailbox; to no other, they lead nowhere. */
function anchor(address, words) {
  const safe = /^(https?:\/\/|mailto:)/i.test(address) && URL.canParse(address);
  if (!safe) return ["span", {}, ...words];
  return ["a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer" }, ...words];
}

/** A run of marks, which may open and close emphasis: several, next to whatever is no space. After a letter or a digit it
    is not certain to be closed, since it may be a product or a power. */
function emphasis(source, at, mark) {
  const [before, after] = [source[at - 1] ?? " ", source[at + mark.length] ?? " "];
  const space = (c) => /\s/.test(c);
  const punctuation = (c) => /[\p{P}\p{S}]/u.test(c);
  const flanks = (to, from) => !space(to) && (mark.length > 1 || !punctuation(to) || space(from) || punctuation(from));
  let [opens, closes] = [flanks(after, before), flanks(before, after)];
  const product = mark === "*" && /\d/.test(before) && /\d/.test(after);
  if (product || mark.length > MAX_DEPTH) opens = closes = false;
  if (mark[0] === "_") [opens, closes] = [opens && (!closes || punctuation(before)), closes && (!opens || punctuation(after))];
  return { part: { mark: mark[0], count: mark.length, opens, closes, certain: !/\w/.test(before) }, end: at + mark.length };
}

const TAGS = { "*": ["em", "strong"], _: ["em", "strong"], "~": ["del", "del"] };

/** Resolves runs of marks: each that closes goes with the nearest one before it that opens. */
function emphasized(parts, open) {
  const wrap = (opener, end) => {
    const [from, to] = [parts[opener], parts[end] ?? { count: 2 }];
    const count = Math.min(2, from.count, to.count);
    from.count -= count;
    to.count -= count;
    const inside = joined(parts.splice(opener + 1, end - opener - 1));
    parts.splice(opener + 1, 0, [TAGS[from.mark][count - 1], {}, ...inside]);
  };
  // Three stars are one and two, but one star does not close two that could close, too.
  const fit = (from, to) => from.mark === to.mark && !((from.closes || to.opens) && (from.count + to.count) % 3 === 0 && from.count % 3);
  // Where the runs are that may open, the nearest last.
  const openers = [];
  for (let at = 0; at < parts.length; at += 1) {
    const run = parts[at];
    for (let i = openers.length - 1; run.closes && run.count && i >= 0;) {
      if (fit(parts[openers[i]], run)) {
        openers.length = i + 1;
        wrap(openers[i], at);
        at = openers[i] + 2;
        if (parts[openers[i]].count) continue;
        openers.pop();
      }
      i -= 1;
    }
    if (run.opens && run.count) openers.push(at);
    if (openers.length > MAX_DEPTH) openers.shift();
  }
  for (const at of open ? openers.reverse() : []) {
    while (parts[at].certain && parts[at].count && at + 1 < parts.length) wrap(at, parts.length);
  }
  return parts;
}

/** The nodes of parts, with texts that follow each other as one. */
function joined(parts) {
  const nodes = [];
  for (const part of parts) {
    const node = part.mark ? part.mark.repeat(part.count) : part;
    if (typeof node === "string" && typeof nodes.at(-1) === "string") nodes.push(nodes.pop() + node);
    else if (node !== "") nodes.push(node);
  }
  return nodes;
}

// ---- Nodes on the page ------------------------------------------------------------------------

/** The text of which a block on the page was made. */
const drawnOf = new WeakMap();

/** Makes the children of `parent` those that are wanted. What is there already stays, with what is selected in it. */
function morph(parent, wanted) {
  wanted.forEach((node, i) => {
    const old = parent.childNodes[i];
    const made = typeof node === "string" ? morphText(old, node) : morphElement(old, node);
    if (!old) parent.append(made);
    else if (old !== made) old.replaceWith(made);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

function morphText(old, text) {
  if (old?.nodeType !== Node.TEXT_NODE) return document.createTextNode(text);
  if (text.startsWith(old.data)) old.appendData(text.slice(old.length));
  else old.data = text;
  return old;
}

function morphElement(old, node) {
  const [tag, attributes, ...children] = node;
  const element = old?.localName === tag ? old : document.createElement(tag);
  if (node.raw !== undefined && drawnOf.get(element) === node.raw) return element;
  drawnOf.set(element, node.raw);
  for (const name of element.getAttributeNames()) {
    // Whether details are open is for the reader to say.
    if (!(name in attributes) && name !== "open") element.removeAttribute(name);
  }
  for (const [name, value] of Object.entries(attributes)) {
    if (element.getAttribute(name) !== value) element.setAttribute(name, value);
  }
  morph(element, children);
  return element;
}
