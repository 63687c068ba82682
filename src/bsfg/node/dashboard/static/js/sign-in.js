// Somebody who followed a link from elsewhere may be signed in already: the browser keeps the cookie back at first.

if (new URLSearchParams(location.search).has("elsewhere")) {
  const answer = await fetch("/dashboard/api/session", { credentials: "same-origin", cache: "no-store" });
  if (answer.ok) location.replace("/dashboard/");
}
