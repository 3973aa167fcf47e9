// Lines of logs that arrive while the page is open: put in by time, and never more than a page bears.
"use strict";
(() => {
  const list = document.getElementById("rank-log"), box = document.getElementById("rank-log-box");
  if (!list) return;
  const says = document.getElementById("log-says"), live = document.getElementById("live");
  const follow = document.getElementById("follow"), wrap = document.getElementById("wrap");
  const MOST = 5000, LOOK_BACK = 300;

  // As `ansi.py` does it: colours become classes; backgrounds and hidden text are not obeyed.
  const COLOURS = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"];
  const STYLES = { 1: "bold", 2: "dim", 3: "italic", 4: "under", 7: "invert" };
  const ENDS = { 22: ["bold", "dim"], 23: ["italic"], 24: ["under"], 27: ["invert"] };
  const OBEYED = /(?!\x1b\[[\d;]*m)[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u200b\u2028\u2029\u2060\ufeff\u206a-\u206f\u{e0000}-\u{e007f}\ud800-\udfff]/gu;
  function obey(sequence, state) {
    const codes = sequence.split(";").map((code) => Number(code.slice(0, 4) || 0));
    while (codes.length) {
      const code = codes.shift();
      if (code === 0) { state.styles.clear(); state.colour = ""; }
      else if (STYLES[code]) state.styles.add(STYLES[code]);
      else if (ENDS[code]) for (const name of ENDS[code]) state.styles.delete(name);
      else if (code === 38 || code === 48) {
        const kind = codes.shift();
        let chosen = "";
        if (kind === 5) { const number = codes.shift() || 0; chosen = number < 16 ? COLOURS[number % 8] : ""; }
        else if (kind === 2) codes.splice(0, 3);
        if (code === 38) state.colour = chosen;
      }
      else if (code === 39) state.colour = "";
      else if ((code >= 30 && code <= 37) || (code >= 90 && code <= 97)) state.colour = COLOURS[code % 10];
    }
  }
  function put(into, text) {
    const search = list.dataset.search, parts = search ? text.split(search) : [text];
    parts.forEach((part, place) => {
      if (place) { const mark = document.createElement("mark"); mark.textContent = search; into.append(mark); }
      if (part) into.append(part);
    });
  }
  function write(into, line) {
    const state = { styles: new Set(), colour: "" };
    line.replace(OBEYED, "\ufffd").split(/\x1b\[([\d;]*)m/).forEach((part, place) => {
      if (place % 2) { obey(part, state); return; }
      if (!part) return;
      const names = [...[...state.styles].sort(), ...(state.colour ? [state.colour] : [])];
      if (!names.length) { put(into, part); return; }
      const span = document.createElement("span");
      span.className = names.map((name) => `ansi-${name}`).join(" ");
      put(span, part);
      into.append(span);
    });
  }

  function near(line) {
    if (!line.at) return list.dataset.job;
    const at = Date.parse(line.at), of = (ms) => new Date(at + ms).toISOString();
    return `${list.dataset.job}?${new URLSearchParams({ round: line.round, since: of(-5000), until: of(5000) })}`;
  }
  function only(line) {
    const query = new URLSearchParams(location.search);
    query.delete("cursor");
    query.set("rank", line.rank);
    query.set("round", line.round);
    return `${list.dataset.job}?${query}`;
  }
  function linked(name, href, text, title) {
    const link = document.createElement("a");
    link.className = name; link.href = href; link.textContent = text; link.title = title; link.tabIndex = -1;
    return link;
  }
  function row(line) {
    const item = document.createElement("li"), text = document.createElement("code"), mark = document.createElement("span");
    item.dataset.at = line.at || "";
    item.append(
      linked("log-at", near(line), line.at ? new Date(line.at).toISOString().slice(11, 23) : "—", `${line.at || "its time is not known"}: what all ranks wrote around then`),
      linked("log-rank", only(line), String(line.rank), `Rank ${line.rank} on ${line.node}, ${line.stream}, round ${line.round}`),
      mark, text);
    mark.className = "log-mark";
    if (line.stream === "stderr") {
      item.className = "err";
      const name = document.createElement("abbr");
      name.title = "stderr"; name.textContent = "E";
      mark.append(name);
    }
    write(text, line.text);
    if (line.is_partial) {
      const more = document.createElement("span");
      more.className = "muted"; more.title = "The line goes on in the next one"; more.textContent = "…";
      text.append(more);
    }
    return item;
  }
  // Lines of several nodes arrive a little out of order: each goes to its time.
  function add(line) {
    const item = row(line), at = Date.parse(line.at);
    let after = list.lastElementChild;
    for (let back = 0; after && back < LOOK_BACK && Date.parse(after.dataset.at) > at; back += 1) after = after.previousElementSibling;
    if (after) after.after(item); else list.prepend(item);
  }
  const isAtEnd = () => box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  const toEnd = () => { box.scrollTop = box.scrollHeight; };

  let source = null, ended = false, added = 0, dropped = 0;
  function say(state) {
    if (!live) return;
    live.dataset.state = state;
    live.querySelector("b").textContent = { on: "live", off: "not live", lost: "no connection" }[state];
  }
  function tell() {
    const more = `${added.toLocaleString("en").replaceAll(",", "\u202f")} new ${added === 1 ? "line" : "lines"}`;
    says.textContent = dropped ? `${more}; the oldest were taken off this page` : added ? more : "\u00a0";
  }
  function take(event) {
    const wasAtEnd = isAtEnd(), none = document.getElementById("log-none");
    if (none) none.remove();
    const lines = JSON.parse(event.data).items;
    for (const line of lines) add(line);
    added += lines.length;
    while (list.children.length > MOST) { list.firstElementChild.remove(); dropped += 1; }
    if (wasAtEnd) toEnd();
    tell();
  }
  function listen() {
    if (source || ended || document.hidden || !follow || follow.getAttribute("aria-pressed") !== "true") return;
    const url = new URL(list.dataset.follow, location.href);
    if (last) url.searchParams.set("cursor", last);
    source = new EventSource(url);
    source.onopen = () => say("on");
    source.onerror = () => { say("lost"); if (source && source.readyState === 2) { hang(); setTimeout(listen, 5000); } };
    source.addEventListener("lines", (event) => { last = event.lastEventId || last; take(event); });
    source.addEventListener("problem", (event) => { ended = true; hang(); say("off"); says.textContent = JSON.parse(event.data).detail; });
  }
  let last = "";
  function hang() { if (source) source.close(); source = null; }
  if (follow) {
    follow.hidden = false;
    follow.addEventListener("click", () => {
      const isOn = follow.getAttribute("aria-pressed") !== "true";
      follow.setAttribute("aria-pressed", String(isOn));
      if (isOn) { toEnd(); listen(); } else { hang(); say("off"); }
    });
    document.addEventListener("visibilitychange", () => { if (document.hidden) hang(); else listen(); });
    window.addEventListener("pagehide", hang);
    window.addEventListener("pageshow", listen);
  }
  wrap.hidden = false;
  wrap.addEventListener("click", () => {
    const isOn = wrap.getAttribute("aria-pressed") !== "true";
    wrap.setAttribute("aria-pressed", String(isOn));
    box.classList.toggle("wrapped", isOn);
  });
  if ("newest" in list.dataset) toEnd();
  listen();
})();
