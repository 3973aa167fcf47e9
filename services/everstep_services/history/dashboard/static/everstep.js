// Live pages without a framework: a page is fetched again when facts come, and what changed is put in.
"use strict";
(() => {
  const body = document.body;
  const live = document.getElementById("live");

  // Times: relative in the page, exact on hover; they grow old while the page is open.
  const STEPS = [[172800, 86400, "d"], [5400, 3600, "h"], [90, 60, "min"], [0, 1, "s"]];
  function relative(seconds) {
    const age = Math.abs(seconds);
    if (age < 2) return "now";
    const [, unit, name] = STEPS.find(([least]) => age >= least);
    const text = `${Math.round(age / unit)} ${name}`;
    return seconds > 0 ? `${text} ago` : `in ${text}`;
  }
  function tick() {
    const now = body.dataset.now ? Date.parse(body.dataset.now) : Date.now();  // a bundle stands still
    for (const time of document.querySelectorAll("time[datetime]")) {
      const text = relative((now - Date.parse(time.dateTime)) / 1000);
      if (time.textContent !== text) time.textContent = text;
      if (!time.dataset.local) {
        time.dataset.local = "1";
        time.title = `${time.title} (here ${new Date(time.dateTime).toLocaleString()})`;
      }
    }
  }

  // Fetch the same URL, and replace the parts that differ. What a person has opened stays open.
  let loading = false, again = false, wanted = 0;
  const KEEP = "[data-keep]";
  function isBusy(part) {
    const focus = document.activeElement;
    return part.matches(KEEP) || (focus && part.contains(focus) && /^(INPUT|SELECT|TEXTAREA)$/.test(focus.tagName))
      || (String(window.getSelection()) && part.contains(window.getSelection().anchorNode));
  }
  function swap(old, fresh) {
    if (old.innerHTML === fresh.innerHTML) return;
    const open = [...old.querySelectorAll("details")].map((one) => one.open);
    const scrolls = [...old.querySelectorAll(".wide, .log")].map((one) => [one.scrollLeft, one.scrollTop]);
    old.innerHTML = fresh.innerHTML;
    old.querySelectorAll("details").forEach((one, i) => { if (i < open.length) one.open = open[i]; });
    old.querySelectorAll(".wide, .log").forEach((one, i) => { if (scrolls[i]) [one.scrollLeft, one.scrollTop] = scrolls[i]; });
    old.classList.remove("changed");
    void old.offsetWidth;
    old.classList.add("changed");
  }
  async function refresh() {
    if (loading) { again = true; return; }
    loading = true;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" }, credentials: "same-origin" });
      if (answer.redirected && new URL(answer.url).pathname === "/login") { location.reload(); return; }
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const banners = fresh.getElementById("banners");
      if (banners) swap(document.getElementById("banners"), banners);
      if (answer.ok) {
        for (const part of document.querySelectorAll("main [id]:is(section, dl, div)")) {
          const other = fresh.getElementById(part.id);
          if (other && !part.parentElement.closest("main [id]:is(section, dl)") && !isBusy(part)) swap(part, other);
        }
        const known = [...document.querySelectorAll("main > section[id]")].map((one) => one.id).join();
        const now = [...fresh.querySelectorAll("main > section[id]")].map((one) => one.id).join();
        if (known !== now && !document.querySelector("main :focus")) {
          const main = document.getElementById("main");
          if (!main.querySelector(KEEP)) main.innerHTML = fresh.getElementById("main").innerHTML;
        }
      }
      readAt = Date.now();
      tick();
    } catch {
      say("lost");
    } finally {
      loading = false;
      if (again) { again = false; soon(); }
    }
  }
  function soon() {
    const wait = Math.max(0, 1500 - (Date.now() - readAt));
    clearTimeout(wanted);
    wanted = setTimeout(refresh, wait);
  }

  // The stream. It is closed while nobody sees the page: browsers have few connections to a host.
  let source = null, readAt = Date.now(), heardAt = Date.now();
  function say(state) {
    if (!live) return;
    live.dataset.state = state;
    const text = { on: "live", bus: "the bus is away", off: "not live", lost: `no connection for ${relative((Date.now() - heardAt) / 1000).replace(" ago", "")}` }[state];
    live.querySelector("b").textContent = text;
    live.title = state === "lost" ? "The service is not reached; the page shows what it knew" : "Live updates";
    const old = document.getElementById("stale");
    if (state === "lost" && !old) {
      const note = document.createElement("p");
      note.id = "stale"; note.className = "banner bad"; note.setAttribute("role", "alert");
      note.textContent = "The service is not reached: this page shows what was known when it was last read.";
      document.getElementById("banners").before(note);
    } else if (state !== "lost" && old) old.remove();
  }
  function listen() {
    if (source || document.hidden || !("live" in body.dataset)) return;
    source = new EventSource(`/live${body.dataset.live ? `?${body.dataset.live}` : ""}`);
    source.onopen = () => { heardAt = Date.now(); say("on"); };
    source.onerror = () => { if (Date.now() - heardAt > 4000) say("lost"); if (source && source.readyState === 2) { hang(); setTimeout(listen, 5000); } };
    source.addEventListener("fact", () => { heardAt = Date.now(); say("on"); soon(); });
    source.addEventListener("reset", soon);
    source.addEventListener("bus", (event) => { heardAt = Date.now(); say(JSON.parse(event.data).is_connected ? "on" : "bus"); soon(); });
  }
  function hang() { if (source) source.close(); source = null; }
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) hang();
    else { listen(); if ("live" in body.dataset && Date.now() - readAt > 3000) refresh(); }
  });
  window.addEventListener("pagehide", hang);

  // On a narrow screen the tabs scroll: show that of this page.
  const tab = document.querySelector(".tabs [aria-current]");
  if (tab) tab.parentElement.scrollLeft = tab.offsetLeft - (tab.parentElement.clientWidth - tab.offsetWidth) / 2;

  // Theme: the system's, until somebody switches.
  const theme = document.getElementById("theme");
  if (theme) theme.addEventListener("click", () => {
    const set = document.documentElement.dataset.theme;
    const isDark = set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    const next = isDark ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    document.cookie = `everstep_theme=${next}; path=/; max-age=31536000; SameSite=Strict`;
  });

  // Small helpers.
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy], [data-print]");
    if (!button) return;
    if ("print" in button.dataset) { window.print(); return; }
    const text = await (await fetch(button.dataset.copy, { credentials: "same-origin" })).text();
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      location.href = button.dataset.copy;
    }
  });
  document.addEventListener("change", (event) => { if ("submit" in event.target.dataset) event.target.form.requestSubmit(); });
  document.addEventListener("submit", (event) => {
    // Empty filters do not belong into a link.
    if (event.target.method !== "get") return;
    for (const field of event.target.elements) if (field.name && !field.value) field.disabled = true;
  });
  window.addEventListener("pageshow", () => { for (const field of document.querySelectorAll(":disabled")) field.disabled = false; });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const places = { f: "/", j: "/jobs", i: "/incidents", n: "/nodes", c: "/control" };
    if (event.key === "/") { const find = document.querySelector(".find input"); if (find) { event.preventDefault(); find.focus(); } }
    else if (keyBefore === "g" && places[event.key]) location.href = places[event.key];
    keyBefore = event.key;
  });
  let keyBefore = "";
  document.addEventListener("click", (event) => {
    for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(event.target)) menu.open = false;
  });

  for (const log of document.querySelectorAll("[data-end]")) log.scrollTop = log.scrollHeight;
  tick();
  setInterval(tick, 5000);
  listen();
  if ("live" in body.dataset) setInterval(() => { if (!document.hidden && Date.now() - readAt > 15000) refresh(); }, 5000);
})();
