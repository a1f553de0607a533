#!/usr/bin/env python3
"""Tests the page at / in headless Chromium against running servers, and makes its pictures.

    apt-get install chromium; pip install playwright    # and pillow for --screenshot
    scripts/page-test.py [--binary target/release/foretoken] [--chromium /usr/bin/chromium] [--screenshot docs/page.png]
                         [--looks FOLDER]

Prints a line per check; the exit code is 1 if one failed. The servers run the embedded demonstration pair.
"""
import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request

from playwright.sync_api import sync_playwright

OWL = "Write a short story about a lonely owl in the snow who waits for the rain."
LONG = 60_000  # milliseconds
# Draft however busy this machine is.
DRAFTS = ("--spec-budget", "fixed")
# The models of the program.
MODELS = {"demo": "foretoken-demo", "small": "foretoken-demo-draft"}


class Server:
    """A server on a free port; it lives as long as the `with` block."""

    def __init__(self, binary, *flags, key=None):
        environment = {**os.environ, "RUST_LOG": "warn"}
        if key:
            environment["FORETOKEN_API_KEY"] = key
        self.process = subprocess.Popen([binary, *flags, "--port", "0"], env=environment, stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if found := re.search(r"serves (http://\S+)", line):
                self.url = found[1]
                return
        raise SystemExit(f"{binary} does not start")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def post(self, path, body):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)


class Page:
    """A tab, with what it asked for and complained about."""

    def __init__(self, browser, server, tokens=True, **context):
        self.context = browser.new_context(**{"viewport": {"width": 1100, "height": 800}, **context})
        self.tab = self.context.new_page()
        self.server, self.requests, self.complaints, self.answers = server, [], [], []
        self.tab.on("request", lambda request: self.requests.append(request))
        self.tab.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        self.tab.on("console", lambda m: m.type in ("error", "warning") and self.complaints.append(f"{m.text} {m.location.get('url')}"))
        self.tab.goto(server.url + "/")
        if tokens:
            self.tab.check("#tokens")

    def until(self, expression, argument=None):
        """Waits until it is true. (Playwright's own wait needs eval, which the page's policy forbids.)"""
        for _ in range(LONG // 50):
            if self.tab.evaluate(expression, argument):
                return
            self.tab.wait_for_timeout(50)
        raise AssertionError(f"never true: {expression}")

    def ask(self, text):
        self.tab.fill("#question", text)
        self.tab.press("#question", "Enter")

    def answered(self, count=1):
        """Waits for so many whole answers; returns the text of the last one."""
        done = "#log .answer[aria-busy=false]"
        self.until(f"document.querySelectorAll('{done}').length >= {count}")
        return self.tab.locator(done).nth(count - 1).locator(".tokens").text_content()

    def tell(self, text, size=3):
        """Has the next answers be this text, in chunks of so many characters."""
        chunks = [{"delta": {"content": text[at:at + size]}} for at in range(0, len(text), size)] + [{"delta": {}, "finish_reason": "stop"}]
        body = "".join(f"data: {json.dumps({'choices': [chunk]})}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self.tab.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))

    def last_stream(self):
        """What the page last asked for, and the chunks it got."""
        request = [r for r in self.requests if r.method == "POST"][-1]
        lines = request.response().text().split("\n\n")
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]", events[-1]
        return json.loads(request.post_data), [json.loads(event) for event in events[:-1]]

    def never_end(self, maximum):
        """Texts go on until the maximum: those of the demonstration model would be over too soon."""
        self.tab.evaluate("""const ask = window.fetch; window.fetch = (url, options) => ask(url, options?.body
            ? {...options, body: JSON.stringify({...JSON.parse(options.body), ignore_eos: true})} : options); 0""")
        self.tab.fill("#max_tokens", str(maximum))

    def alert(self):
        box = self.tab.locator(".problem").last
        box.wait_for(timeout=LONG)
        return box.text_content()

    def race(self, when="after"):
        self.tab.click("#tab-race")
        self.tab.check(f"input[value='{when}']")
        self.tab.click("#go")
        return self.raced()

    def raced(self):
        self.tab.wait_for_selector("#replay:not([hidden])", timeout=LONG)
        return self.tab.text_content("#verdict"), self.tab.locator(".lanes .tokens").all_text_contents()

    def check_round_is_in_view(self):
        box, window = self.tab.locator("#round").bounding_box(), self.tab.viewport_size
        for start, size in (("x", "width"), ("y", "height")):
            assert 0 <= box[start] <= window[size] - box[size], (box, window)

    def overflow(self):
        """By how many pixels the page is wider than the window, and what sticks out."""
        return self.tab.evaluate("""() => [document.documentElement.scrollWidth - innerWidth,
          [...document.querySelectorAll('body *')].filter((e) => e.offsetParent && !e.closest('.only-read, pre, table')
            && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.tagName + '.' + e.className)]""")

    def close(self, expected=()):
        """Checks that it went nowhere else, and had nothing to complain about but what is `expected`."""
        origin = self.server.url
        others = [r.url for r in self.requests if not r.url.startswith((origin, "data:"))]
        assert not others, others
        left = [c for c in self.complaints if not any(e in c for e in expected)]
        assert not left, left
        self.context.close()


def rounds_of(chunks):
    choices = (choice for chunk in chunks for choice in chunk["choices"])
    return [r for choice in choices for r in choice.get("speculation", [])]


def chat(browser, server, _):
    """a chat's tokens are the API's text, coloured by source"""
    page = Page(browser, server)
    # At this temperature the model refuses some of what is drafted.
    page.tab.fill("#temperature", "1")
    page.ask(OWL)
    text = page.answered()
    body, chunks = page.last_stream()
    rounds = rounds_of(chunks)
    content = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    plain = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
    reply = server.post("/v1/chat/completions", plain)["choices"][0]["message"]["content"]
    assert text == content == reply and len(text) > 200, (text, content, reply)
    sources = [t["source"] for r in rounds for t in r["tokens"] if t["text"]]
    shown = page.tab.evaluate("[...document.querySelectorAll('.tokens .t')].map((t) => t.className.split(' ')[1])")
    assert shown == sources
    colours = dict(page.tab.evaluate("""[...document.querySelectorAll('.tokens .t')].map((t) =>
        [t.className.split(' ')[1], getComputedStyle(t).backgroundColor + getComputedStyle(t).textDecorationLine])"""))
    assert len(set(colours.values())) == len(colours) >= 3, colours
    legend = dict(page.tab.evaluate("""[...document.querySelectorAll('#legend li')].map((l) =>
        [l.firstChild.className.split(' ')[1], Number(l.lastChild.textContent)])"""))
    page.tab.wait_for_timeout(200)
    usage = chunks[-1]["usage"]
    spec = usage["speculative_decoding"]
    assert sum(legend.values()) == usage["completion_tokens"], (legend, usage)
    assert page.tab.text_content("#drafted") == str(spec["num_draft_tokens"])
    assert page.tab.text_content("#accepted") == f"{round(100 * spec['acceptance_rate'])} %"
    assert float(page.tab.text_content("#speed")) > 1
    label = page.tab.get_attribute("#chart svg", "aria-label")
    counts = re.findall(r"position \d+: (\d+) of (\d+)", label)
    assert sum(int(a) for a, _ in counts) == spec["num_accepted_tokens"], label
    page.ask("And then?")
    page.answered(2)
    turns = [m["role"] for m in page.last_stream()[0]["messages"]]
    assert turns == ["user", "assistant", "user"], turns
    page.close()
    return f"{usage['completion_tokens']} tokens, {', '.join(f'{s} {n}' for s, n in legend.items() if n)}"


def tooltip(browser, server, _):
    """hover shows a round: what was drafted, accepted and rejected"""
    page = Page(browser, server)
    page.ask(OWL)
    page.answered()
    rounds = rounds_of(page.last_stream()[1])
    number = next(i for i, r in enumerate(rounds) if any(not n["accepted"] for n in r["draft"]))
    first = sum(bool(t["text"]) for r in rounds[:number] for t in r["tokens"])
    page.tab.locator(".tokens .t").nth(first).hover()
    page.tab.wait_for_selector("#round:not([hidden])")
    draft, tokens = rounds[number]["draft"], rounds[number]["tokens"]
    accepted = sum(n["accepted"] for n in draft)
    text = page.tab.text_content("#round")
    assert f"Round {number + 1}: {accepted} of {len(draft)} draft tokens accepted" in text, text
    assert page.tab.locator("#round .chip").count() == len(draft) + len(tokens)
    assert page.tab.locator("#round .chip.accepted").count() == accepted
    assert page.tab.locator("#round .chip.rejected").count() > 0
    page.check_round_is_in_view()
    same = page.tab.locator(".t.same").count()
    assert same == sum(bool(t["text"]) for t in tokens)
    page.tab.mouse.move(5, 5)
    page.tab.wait_for_selector("#round", state="hidden")
    page.close()
    return text.split(" accepted")[0] + " accepted"


# What a model may write, with what is easily read wrongly.
DOCUMENT = """# Owls *at* night

Two **bold words**, `a*b*c`, 5*3*2, snake_case_name and ***both***. ~~Gone~~, \\*kept\\*.
A second line, <b>no tag</b> &amp; see [the page](https://example.com/a_(b)?c=1&d=2 "t"), https://example.com/x.

## Steps

1. First:
   - deep `one`
   - deep two

     with more
2. Second
   ```py
   def owl():
   \tprint("**hoo**")

   owl()
   ```
3. Third

- [click](javascript:alert(1)) ![picture](https://example.com/p.png)
- 中文**强调**文字

| Name | Price \\| each |  |
|:-----|----:|---|
| `a` | **1** | x |
| b | 2 |

> quoted
> more

---
The *end*."""


def markdown(browser, server, _):
    """answers are Markdown, of elements that do no harm, and code can be copied"""
    page = Page(browser, server, tokens=False, permissions=["clipboard-read", "clipboard-write"])
    page.tell(DOCUMENT)
    page.ask("Tell me")
    page.answered()
    texts = lambda which: page.tab.locator(f".prose {which}").all_text_contents()
    assert texts("h3") == ["Owls at night"] and texts("h4") == ["Steps"]
    assert texts("strong") == ["bold words", "both", "强调", "1"] and texts("em") == ["at", "both", "end"], (texts("strong"), texts("em"))
    assert texts("p")[0].startswith("Two bold words, a*b*c, 5*3*2, snake_case_name and both. Gone, *kept*.\nA second line, <b>no tag</b> &amp; see"), texts("p")
    assert texts("del") == ["Gone"] and texts("p code")[0] == "a*b*c" and texts("blockquote") == ["quoted\nmore"]
    assert texts("> ol > li > ul > li") == ["deep one", "deep twowith more"], texts("> ol > li > ul > li")
    assert len(texts("> ol > li")) == 3 and len(texts("> ol")) == 1 and len(texts("hr")) == 1
    code = 'def owl():\n\tprint("**hoo**")\n\nowl()'
    assert texts("pre") == [code], texts("pre")
    rows = [page.tab.locator(".prose tr").nth(i).locator("th, td").all_text_contents() for i in range(3)]
    assert rows == [["Name", "Price | each", ""], ["a", "1", "x"], ["b", "2", ""]], rows
    links = page.tab.evaluate("[...document.querySelectorAll('.prose a')].map((a) => [a.textContent, a.getAttribute('href'), a.rel, a.target])")
    how = ["noopener noreferrer", "_blank"]
    addresses = [("the page", "https://example.com/a_(b)?c=1&d=2"), ("https://example.com/x",) * 2, ("picture", "https://example.com/p.png")]
    assert links == [[*address, *how] for address in addresses], links
    tags = set(page.tab.evaluate("[...document.querySelectorAll('.prose *')].map((e) => e.localName)"))
    assert not tags & {"b", "img", "script", "iframe", "style"}, tags
    page.tab.click(".copy")
    page.until("document.querySelector('.copy').textContent === 'Copied'")
    assert page.tab.evaluate("navigator.clipboard.readText()") == code
    page.ask("And then?")
    page.answered(2)
    # What the model reads again is what it wrote.
    assert json.loads([r for r in page.requests if r.method == "POST"][-1].post_data)["messages"][1]["content"] == DOCUMENT
    page.close()
    return f"{len(tags)} elements, {len(links)} links"


def steady(browser, server, _):
    """while an answer arrives, nothing of it that was shown goes away or is made anew"""
    page = Page(browser, server, tokens=False)
    worst = page.tab.evaluate("""(text) => {
      const [box, seen] = [document.createElement('div'), []];
      // The head of a code block is beside the text.
      const words = (e) => [...e.childNodes].map((c) => c.className === 'head' ? '' : c.nodeType === 3 ? c.data : words(c)).join('');
      let [shown, first] = ['', null];
      for (let end = 1; end <= text.length; end += 1) {
        morph(box, markdown(text.slice(0, end), end < text.length));
        if (!words(box).startsWith(shown)) seen.push([text.slice(0, end).slice(-20), shown.slice(-30), words(box).slice(-30)]);
        shown = words(box);
        first ??= box.querySelector('p')?.firstChild;
      }
      const fresh = document.createElement('div');
      morph(fresh, markdown(text));
      return [seen, first === box.querySelector('p').firstChild, fresh.innerHTML === box.innerHTML];
    }""", DOCUMENT)
    assert worst == [[], True, True], worst
    # Texts that were made to take long.
    long = [piece * 10_000 for piece in ("*a ", "[", "`` ` ", "> ", "- ", "| ", "**a_b", "# #", "[a](", "\\", "_a*", "1. \n")]
    long += ["*a " * 10_000 + "a* " * 10_000, "*" * 10_000 + "a" + "*" * 10_000, "[" * 10_000 + "a" + "](" * 10_000]
    long += ["` " + "a" * 40_000 + "`", "#" * 40_000 + "a", "# " + "#" * 40_000 + "a", "|a|b\n|-" + " " * 40_000 + "x|", "https://a" + ")" * 40_000]
    took = page.tab.evaluate("""(texts) => texts.flatMap((text) => [false, true].map((open) => {
      const start = performance.now();
      morph(document.createElement('div'), markdown(text, open));
      return performance.now() - start;
    }))""", long)
    assert max(took) < 2000, took
    page.close()
    return f"{len(DOCUMENT)} steps; {max(took):.0f} ms for the worst of {len(took)} hostile texts"


def temperature(browser, server, _):
    """the temperature beside the question is the one that is sent, in the chat and in the race"""
    page = Page(browser, server, tokens=False)
    page.tab.fill("#max_tokens", "8")
    sent = []
    for value in ("0", "0.7", ""):
        page.tab.fill("#temperature", value)
        page.ask("Hi")
        page.answered(len(sent) + 1)
        sent.append(page.last_stream()[0].get("temperature"))
        foot = page.tab.locator("#log .foot").last.text_content()
        assert (f"temperature\u00a0{value} ·" in foot) == (value != ""), foot
    assert sent == [0, 0.7, None], sent
    page.tab.click("#tab-race")
    page.tab.fill("#start .temperature input", "1.2")
    page.race()
    assert page.last_stream()[0]["temperature"] == 1.2
    page.tab.click("#tab-chat")
    assert page.tab.input_value("#temperature") == "1.2"
    page.close()
    return ", ".join(map(str, sent))


def thoughts(browser, server, _):
    """what a model thinks is there to be opened"""
    page = Page(browser, server, tokens=False)
    deltas = [{"reasoning_content": "Owls *think*. "}, {"reasoning_content": "Long."}, {"content": "Hoo."}]
    body = "".join(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas) + "data: [DONE]\n\n"
    page.tab.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.ask("Hi")
    page.answered()
    assert page.tab.is_hidden(".thoughts p") and page.tab.text_content(".prose > p") == "Hoo."
    page.tab.click(".thoughts summary")
    assert page.tab.text_content(".thoughts p") == "Owls think. Long." and page.tab.is_visible(".thoughts em")
    page.close()
    return "closed at first"


def announced(browser, server, _):
    """a screen reader is told what there is: names, roles, states, and an answer when it is whole"""
    page = Page(browser, server, tokens=False)
    nameless = page.tab.evaluate("""[...document.querySelectorAll('button, input, textarea, select, [role=region], [role=tab]')]
        .filter((e) => !(e.labels?.length || e.getAttribute('aria-label') || e.textContent.trim())).map((e) => e.outerHTML)""")
    assert nameless == [], nameless
    page.tell(DOCUMENT)
    page.ask("Tell me")
    page.answered()
    log = page.tab.get_by_role("log", name="Conversation")
    assert log.get_attribute("aria-live") == "polite"
    assert log.get_by_role("article", name="Answer").get_attribute("aria-busy") == "false"
    for role, name in (("heading", "Owls at night"), ("link", "the page"), ("button", "Copy"), ("region", "Code, py"), ("region", "Table"), ("columnheader", "Name")):
        assert log.get_by_role(role, name=name).count() == 1, (role, name)
    assert page.tab.get_by_role("textbox", name="Message").get_attribute("aria-describedby") == "keys"
    assert page.tab.get_by_role("spinbutton", name="Temperature").count() == 1
    switch = page.tab.get_by_role("switch", name="Tokens")
    assert not switch.is_checked() and page.tab.is_hidden("#log .tokens")
    switch.check()
    assert page.tab.is_hidden("#log .prose") and page.tab.locator("#log .tokens").count() == 1
    page.close()
    return "log, article, switch, regions"


def stopping(browser, server, _):
    """an answer can be stopped, by button and key, and goes into the next turn; a new chat forgets all"""
    page = Page(browser, server)
    page.never_end(400)
    texts = []
    for turn, stop in enumerate((lambda: page.tab.click("#stop", force=True), lambda: page.tab.press("#question", "Escape"), lambda: page.tab.press("#clear", "Escape")), 1):
        page.ask(OWL)
        page.until(f"document.querySelectorAll('#log .answer').length === {turn} && document.querySelector('#log .answer:last-of-type .t')")
        stop()
        texts.append(page.answered(turn))
        assert "stopped" in page.tab.locator("#log .foot").nth(turn - 1).text_content()
        assert page.tab.is_visible("#send") and not page.tab.is_visible("#stop")
    # The end of the conversation stays in view.
    last, form = (page.tab.locator(which).last.bounding_box() for which in ("#log .foot", "#ask"))
    assert last["y"] + last["height"] <= form["y"] + 1 and form["y"] + form["height"] <= 801, (last, form)
    sent = json.loads([r for r in page.requests if r.method == "POST"][-1].post_data)["messages"]
    assert sent[1] == {"role": "assistant", "content": texts[0]}, sent
    page.ask(OWL)
    page.until("document.querySelectorAll('#log .answer').length === 4")
    page.tab.click("#clear")
    assert page.tab.locator("#log .answer").count() == 0 and page.tab.is_visible(".welcome")
    page.tab.fill("#max_tokens", "5")
    page.ask("Hi")
    page.answered()
    assert len(page.last_stream()[0]["messages"]) == 1
    page.close()
    return f"{', '.join(str(len(text)) for text in texts)} characters"


def continuing(browser, server, _):
    """a model without a chat template continues the text"""
    page = Page(browser, server)

    def without_template(route):
        reply = route.fetch()
        route.fulfill(response=reply, body=reply.text().replace('"chat/completions"', '"completions"'))

    page.tab.route(server.url + "/", without_template)
    page.tab.reload()
    assert "continues your text" in page.tab.text_content(".welcome")
    page.tab.fill("#max_tokens", "40")
    page.ask("The owl")
    text = page.answered()
    page.ask("But then")
    page.answered(2)
    body, _ = page.last_stream()
    assert body["prompt"] == f"The owl{text}\n\nBut then" and len(text) > 20, body
    verdict, (fast, plain) = page.race()
    assert "equal" in verdict and fast == plain
    page.close()
    return repr(text[:40])


def race(browser, server, _):
    """the race ends with equal texts, in both modes, and can be replayed"""
    page = Page(browser, server)
    page.tab.fill("#temperature", "0.8")
    page.tab.fill("#max_tokens", "120")
    lines = []
    for when in ("after", "at once"):
        verdict, (fast, plain) = page.race(when)
        assert "equal" in verdict and fast == plain and len(fast) > 100, (verdict, fast, plain)
        bodies = [json.loads(r.post_data) for r in page.requests if r.method == "POST"]
        bodies = [body for body in bodies if body["max_tokens"] == 120][-2:]
        assert "spec_length" not in bodies[0] and bodies[1]["spec_length"] == 0
        salts = [b.pop("cache_salt") for b in bodies]
        del bodies[1]["spec_length"]
        assert bodies[0] == bodies[1] and salts[0] != salts[1]
        assert page.tab.locator(".lanes .t.target").count() > page.tab.locator(".lanes > :last-child .t").count()
        assert page.tab.locator(".lanes > :last-child .t:not(.target)").count() == 0
        lines.append(f"{when}: {verdict.split(' as')[0]}")
    total = max(float(clock.removesuffix(" s")) for clock in page.tab.locator(".clock").all_text_contents())
    page.tab.click("#replay")
    # In the middle of a replay, the button begins another.
    page.tab.wait_for_timeout(500 * total)
    began = time.monotonic()
    page.tab.click("#replay")
    assert page.raced()[1] != [fast, plain]
    page.until("(want) => [...document.querySelectorAll('.lanes .tokens')].every((t, i) => t.textContent === want[i])", [fast, plain])
    took = time.monotonic() - began
    assert 0.8 * total < took < total + 2, (took, total)
    page.close()
    return ", ".join(lines)


def several(browser, _, binary):
    """behind the router, the model of the list answers"""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write("".join(f"[[model]]\nname = '{name}'\nmodel = '{model}'\n" for name, model in MODELS.items()))
        file.flush()
        with Server(binary, "router", "--config", file.name) as router:
            page = Page(browser, router)
            page.until("document.querySelectorAll('#model option').length === 2")
            for count, name in enumerate(MODELS, 1):
                page.tab.select_option("#model", name)
                page.ask("Hi")
                assert page.answered(count)
                assert page.last_stream()[0]["model"] == name
            page.close()
    return " and ".join(MODELS)


def errors(browser, server, binary):
    """a wrong key, bad values, a full queue and a dead server are shown, and can be got over"""
    with Server(binary, key="secret") as locked:
        page = Page(browser, locked)
        assert "asks for an API key" in page.alert()
        page.tab.click("text=Enter the key")
        page.tab.keyboard.type("wrong")
        page.tab.keyboard.press("Enter")
        page.ask("Hi")
        page.tab.wait_for_selector(".problem:has-text('missing or wrong')")
        page.tab.fill("#key", "secret")
        page.tab.press("#key", "Enter")
        page.until("!document.querySelector('.problem') && document.querySelector('#model-name').textContent")
        page.ask("What is the capital of France?")
        assert page.answered()
        assert "secret" not in page.tab.content()
        page.tab.fill("#temperature", "9")
        page.ask("Hi")
        assert "temperature must be between 0 and 2" in page.alert()
        page.tab.fill("#temperature", "0")
        page.tab.click(".problem >> text=Try again") if page.tab.locator(".problem button").count() else page.ask("Hi")
        page.answered(2)
        locked.kill()
        page.ask("Hi")
        assert "cannot be reached" in page.alert()
        page.close(expected=["Failed to load resource"])
    with Server(binary, "--max-num-seqs", "1", "--max-waiting", "1") as small:
        # Texts that end when the client leaves.
        blockers = [threading.Thread(target=hold, args=(small, 3), daemon=True) for _ in range(2)]
        page = Page(browser, small)
        [blocker.start() for blocker in blockers]
        page.tab.wait_for_timeout(700)
        page.ask("Hi")
        busy = page.alert()
        assert "busy" in busy and "try again in 1 s" in busy, busy
        [blocker.join() for blocker in blockers]
        page.tab.click("text=Try again")
        assert page.answered()
        page.ask(OWL)
        page.tab.wait_for_selector("#stop:not([hidden])")
        page.close(expected=["status of 429"])
    with Server(binary, "--threads", "1") as dying:
        page = Page(browser, dying)
        page.never_end(900)
        # Some of the text shall be there before the server dies, but not all of it.
        page.tab.fill("#spec_length", "0")
        page.ask(OWL)
        time.sleep(0.4)
        dying.kill()
        assert "connection broke" in page.alert()
        assert page.tab.locator(".tokens .t").count() > 0
        page.close(expected=["ERR_"])
    return "401, 400, 429, broken and refused connections"


def hold(server, seconds):
    """Keeps a place in the batch or the queue for a while."""
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "n": 1, "stream": True, "spec_length": 0}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                while reply.read1(65536) and time.monotonic() < end:
                    pass
        except OSError:
            time.sleep(0.01)


def narrow(browser, server, _):
    """at 360 px nothing is wider than the window"""
    page = Page(browser, server, viewport={"width": 360, "height": 740}, has_touch=True)
    seen = [page.overflow()]
    page.ask("x" * 300)
    page.answered()
    for token in page.tab.locator(".tokens .t").all()[:12] + [page.tab.locator(".tokens .t").last]:
        token.tap()
        page.tab.wait_for_selector("#round:not([hidden])")
        page.check_round_is_in_view()
    seen.append(page.overflow())
    page.tab.uncheck("#tokens")
    page.tell(DOCUMENT + "\n\n```\n" + "x" * 300 + "\n```\n" + "| wide " * 30 + "|\n" + "|---" * 30 + "|\n")
    page.ask("Tell me")
    page.answered(2)
    seen.append(page.overflow())
    page.tab.unroute("**/v1/chat/completions")
    page.tab.click("#settings summary")
    seen.append(page.overflow())
    page.race()
    seen.append(page.overflow())
    assert all(by <= 0 and not out for by, out in seen), seen
    page.close()
    return f"{len(seen)} states"


def keyboard(browser, server, _):
    """everything can be done by keyboard alone"""
    page = Page(browser, server, tokens=False)
    tab, keys = page.tab, page.tab.keyboard

    def tab_to(selector, key="Tab", most=40):
        for _ in range(most):
            keys.press(key)
            if tab.evaluate("(s) => document.activeElement.matches(s)", selector):
                return
        raise AssertionError(f"no {key} leads to {selector}")

    tab_to(".skip")
    keys.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "question"
    tab_to("#tab-chat", "Shift+Tab")
    tab_to("#question")
    keys.type(OWL)
    keys.press("Shift+Enter")
    keys.type("Go on.")
    tab_to("#send")
    keys.press("Enter")
    # Its button took the place of the one that had the focus.
    assert tab.evaluate("document.activeElement.id") == "stop"
    page.answered()
    page.until("document.activeElement.id === 'send'")
    assert page.last_stream()[0]["messages"][0]["content"] == f"{OWL}\nGo on."
    tab_to("#temperature")
    tab_to("#tokens")
    keys.press("Space")
    tab_to(".t", "Shift+Tab")
    ring = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert ring == "solid", ring
    first = tab.text_content("#round")
    for _ in range(6):
        keys.press("ArrowRight")
    later = tab.text_content("#round")
    assert first.startswith("Round 1:") and later != first, (first, later)
    described = tab.evaluate("document.activeElement.getAttribute('aria-describedby')")
    assert described == "round"
    keys.press("End")
    keys.press("Escape")
    tab.wait_for_selector("#round", state="hidden")
    tab_to("#tab-chat", "Shift+Tab")
    keys.press("ArrowRight")
    assert tab.is_visible("#race") and not tab.is_visible("#chat")
    tab_to("#prompt")
    tab_to("#go")
    keys.press("Enter")
    verdict = page.raced()[0]
    assert "equal" in verdict
    page.close()
    return f"{later.split(':')[0].lower()} by arrow keys"


def schemes(browser, server, _):
    """light and dark: all text has a contrast of at least 4.5; no motion where none is wanted"""
    worst = {}
    for scheme in ("light", "dark"):
        page = Page(browser, server, color_scheme=scheme, reduced_motion="reduce")
        page.ask(OWL)
        page.answered()
        page.tab.uncheck("#tokens")
        page.tell(DOCUMENT)
        page.ask("Tell me")
        page.answered(2)
        lowest = page.tab.evaluate("""() => {
          const part = (colour) => colour.match(/[\\d.]+/g).map(Number);
          const light = (colour) => part(colour).slice(0, 3).map((c) => c / 255)
            .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
          const behind = (e) => {
            const colour = getComputedStyle(e).backgroundColor;
            return part(colour)[3] === 0 ? behind(e.parentElement) : colour;
          };
          const texts = [...document.querySelectorAll('body *')].filter((e) => e.offsetParent
            && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()));
          return texts.map((e) => {
            const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
            return [(a + 0.05) / (b + 0.05), e.className || e.tagName];
          }).sort((x, y) => x[0] - y[0])[0];
        }""")
        assert lowest[0] >= 4.5, (scheme, lowest)
        worst[scheme] = lowest[0]
        paper = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", paper))) > 384) == (scheme == "light"), paper
        page.tab.evaluate("document.querySelector('.answer').setAttribute('aria-busy', 'true')")
        for which in (".tokens", ".prose > :last-child"):
            shown, motion = page.tab.evaluate("(s) => ['content', 'animationName'].map((p) => getComputedStyle(document.querySelector(s), '::after')[p])", which)
            assert (shown, motion) == ('"▍"', "none"), (which, shown, motion)
        page.close()
    return ", ".join(f"{scheme} {ratio:.1f}" for scheme, ratio in worst.items())


def untrusted(browser, server, _):
    """markup in a text stays text, and nothing foreign can run"""
    page = Page(browser, server)
    page.ask("<img src=x onerror=alert(1)><script>alert(2)</script>")
    page.answered()
    assert page.tab.locator("#log img, #log script").count() == 0
    assert page.tab.locator(".user").text_content().startswith("<img src=x")
    assert not page.complaints
    page.tab.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))")
    assert page.tab.evaluate("window.ran") is None
    names = page.tab.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
    assert names == [0, 0, ""], names
    page.close(expected=["Content Security Policy"])
    return "a script without the nonce is refused"


def screenshot(browser, _, options):
    """the picture of the README"""
    with Server(options.binary, *DRAFTS, "--spec-length", "3") as server:
        return picture(Page(browser, server, viewport={"width": 900, "height": 580}), options.screenshot)


def picture(page, path):
    page.tab.fill("#temperature", "0.8")
    # The first answer teaches the tables something for the second.
    for seed in "34":
        page.tab.click("#clear")
        page.tab.fill("#seed", seed)
        page.ask(OWL)
        page.answered()
    page.tab.evaluate("scrollTo(0, 0)")
    rounds = rounds_of(page.last_stream()[1])
    # A long round with a refusal, whose description does not hide the figures.
    def worth(place):
        number, first = place
        left = page.tab.locator(".tokens .t").nth(first).bounding_box()["x"] < 350
        rejected = any(not node["accepted"] for node in rounds[number]["draft"])
        return left, rejected and texts[number] > 1, texts[number]

    texts = [sum(bool(t["text"]) for t in r["tokens"]) for r in rounds]
    places = [(number, sum(texts[:number])) for number, count in enumerate(texts) if count]
    page.tab.locator(".tokens .t").nth(max(places, key=worth)[1]).hover()
    page.tab.wait_for_timeout(200)
    page.tab.screenshot(path=path)
    from PIL import Image

    # A third of the size, and nobody sees it.
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    size = os.path.getsize(path)
    assert size < 100_000, size
    page.close()
    return f"{path}, {size // 1000} kB"


def looks(browser, server, options):
    """pictures of the page, narrow and wide, light and dark, to look at"""
    os.makedirs(options.looks, exist_ok=True)
    for width, height in ((360, 740), (1280, 800)):
        for scheme in ("light", "dark"):
            page = Page(browser, server, tokens=False, viewport={"width": width, "height": height}, color_scheme=scheme)
            picture_of = lambda name: page.tab.screenshot(path=f"{options.looks}/{name}-{width}-{scheme}.png", full_page=name == "markdown")
            picture_of("welcome")
            page.ask(OWL)
            page.answered()
            page.tab.check("#tokens")
            picture_of("tokens")
            page.tab.uncheck("#tokens")
            page.tell(DOCUMENT)
            page.ask("Tell me about owls, with all that Markdown has.")
            page.answered(2)
            picture_of("markdown")
            page.tab.unroute("**/v1/chat/completions")
            page.race()
            picture_of("race")
            page.close()
    return options.looks


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", default="target/release/foretoken")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--screenshot", help="write the README's picture to this file")
    parser.add_argument("--looks", help="write pictures of the page's states to this folder")
    parser.add_argument("--only", help="the name of one check")
    options = parser.parse_args()
    checks = [chat, tooltip, markdown, steady, thoughts, temperature, announced, stopping, continuing, race, several, errors, narrow, keyboard, schemes, untrusted]
    failed = 0
    # Chromium's sandbox does not work for root; the pages here are ours.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright, Server(options.binary, *DRAFTS, "--spec-topk", "4") as server:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=flags)
        for check in checks + [screenshot] * bool(options.screenshot) + [looks] * bool(options.looks):
            if options.only not in (None, check.__name__):
                continue
            argument = options if check in (screenshot, looks) else options.binary
            try:
                print(f"ok   {check.__doc__}: {check(browser, server, argument)}", flush=True)
            except Exception:
                failed += 1
                print(f"FAIL {check.__doc__}\n{traceback.format_exc(limit=-2)}", flush=True)
        browser.close()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
