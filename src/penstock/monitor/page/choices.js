// What the user chose, kept by the browser over a reload. What was typed to find something goes with the tab, the rest stays.
const TYPED = ["ledger-filter", "search", "plots-filter"];
const store = name => TYPED.includes(name) ? sessionStorage : localStorage;

export function keep(name, value) {
  try { store(name).setItem(`penstock-${name}`, JSON.stringify(value)); } catch { /* a private window keeps nothing */ }
}

// What was kept, if it is still a choice; else null.
export function kept(name, valid) {
  try {
    const value = JSON.parse(store(name).getItem(`penstock-${name}`));
    return value !== null && valid(value) ? value : null;
  } catch { return null; }
}
