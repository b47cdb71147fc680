// The switch between versions: a menu in the header, filled from versions.js beside the folders of the versions. It is
// a script and no JSON, so that pages that are opened from the disk may read it, too.
(() => {
  const own = new URL("..", document.currentScript.src);  // the folder of this version
  const list = document.createElement("script");
  list.src = new URL("../versions.js", own);
  list.onload = () => {
    const here = own.pathname.split("/").filter(Boolean).pop();
    const menu = document.createElement("select");
    menu.title = "Version";
    menu.className = "versions";
    for (const version of window.strataVersions) menu.add(new Option(version, version, false, version === here));
    menu.onchange = () => { location.href = new URL(`../${menu.value}/index.html`, own); };
    const title = document.querySelector(".md-header__title");
    if (title) title.after(menu);
  };
  document.head.append(list);
})();
