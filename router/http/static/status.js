"use strict";
// Refreshes <main> while the page can be seen: one question at a time, each with a deadline, fewer while none is
// answered. The server makes the HTML, so every value is escaped in one place.
(() => {
  const EVERY_MS = 2000, LONGEST_MS = 30000, DEADLINE_MS = 5000, SAMPLES = 90;
  const THEMES = ["auto", "light", "dark"], KEY = "kvrelay.theme";
  const root = document.documentElement;
  const rates = [];
  let before = null;

  const recall = () => {
    try { return THEMES.includes(localStorage[KEY]) ? localStorage[KEY] : "auto"; } catch { return "auto"; }
  };
  const show = (theme) => {
    root.dataset.theme = theme;
    try { localStorage[KEY] = theme; } catch { /* a browser that keeps nothing */ }
  };
  show(recall());

  function follow(main) {
    const tiles = main.querySelector("[data-tokens]"), tile = main.querySelector("#rate");
    const now = { tokens: Number(tiles.dataset.tokens), ms: Number(tiles.dataset.uptimeMs) };
    if (before && now.ms < before.ms) rates.length = 0; // another router process
    else if (before && now.ms > before.ms) rates.push((now.tokens - before.tokens) * 1000 / (now.ms - before.ms));
    if (rates.length > SAMPLES) rates.shift();
    before = now;
    if (!rates.length) return;
    tile.hidden = false;
    tile.querySelector("b").textContent = rates[rates.length - 1].toFixed(1);
    const most = Math.max(...rates, 1);
    const points = rates.map((rate, i) => `${120 - (rates.length - 1 - i) * 120 / SAMPLES},${23 - 22 * rate / most}`);
    tile.querySelector("polyline").setAttribute("points", points.join(" "));
  }

  async function refresh(main) {
    const address = new URL(location.href);
    address.searchParams.set("part", "main");
    const answer = await fetch(address, { signal: AbortSignal.timeout(DEADLINE_MS), cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    main.innerHTML = await answer.text();
  }

  document.addEventListener("DOMContentLoaded", () => {
    const main = document.querySelector("main"), fresh = document.querySelector("#fresh");
    const button = document.querySelector("#theme");
    button.hidden = false;
    button.textContent = root.dataset.theme;
    button.addEventListener("click", () => {
      show(THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length]);
      button.textContent = root.dataset.theme;
    });

    let pause = EVERY_MS, asking = false, timer = 0;
    const tell = (text, kind) => { fresh.textContent = text; fresh.className = kind; };
    async function tick() {
      clearTimeout(timer);
      if (document.hidden || asking) return;
      asking = true;
      try {
        if (!getSelection().toString()) await refresh(main);
        follow(main);
        pause = EVERY_MS;
        tell("live", "on");
      } catch (error) {
        pause = Math.min(2 * pause, LONGEST_MS);
        tell(`no answer (${error.message}); what you see is old`, "off");
      } finally {
        asking = false;
        timer = setTimeout(tick, pause);
      }
    }
    document.addEventListener("visibilitychange", tick);
    follow(main);
    timer = setTimeout(tick, EVERY_MS);
    tell("live", "on");
  });
})();
