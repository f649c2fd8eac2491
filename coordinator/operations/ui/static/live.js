"use strict";
// Every few seconds (data-live of <main>) the page is asked for again, and what differs is changed in place: what is
// open, selected, scrolled or being typed stays.
const seconds = Number(document.querySelector("main").dataset.live);
const told = document.getElementById("live");

function change(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(document.importNode(fresh, true));
  } else if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
  } else if (old.nodeType === Node.ELEMENT_NODE) {
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    for (const { name } of [...old.attributes])
      if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
    const after = [...fresh.childNodes];
    while (old.childNodes.length > after.length) old.lastChild.remove();
    after.forEach((child, at) => {
      if (old.childNodes[at]) change(old.childNodes[at], child);
      else old.append(document.importNode(child, true));
    });
  }
}

async function refresh() {
  if (document.hidden) return;
  try {
    const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(20000) });
    if (!answer.ok) throw new Error(answer.statusText);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    change(document.querySelector("main"), page.querySelector("main"));
    told.textContent = "live";
    told.className = "quiet";
  } catch {
    if (told.className !== "lost") told.textContent = `no answer since ${new Date().toLocaleTimeString()}`;
    told.className = "lost";
  }
}

async function follow() {
  for (;;) {
    await new Promise((done) => setTimeout(done, seconds * 1000));
    await refresh();
  }
}

document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

if (seconds > 0) {
  told.textContent = "live";
  document.addEventListener("visibilitychange", refresh);
  follow();
}
