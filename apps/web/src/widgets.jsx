// Small parts: icons, dialogs, bars, fields.
import { useEffect, useRef } from "preact/hooks";

const PATHS = {
  close: "M5 5l10 10M15 5L5 15",
  menu: "M3 5h14M3 10h14M3 15h14",
  plus: "M10 4v12M4 10h12",
  send: "M10 16V4M5 9l5-5 5 5",
  stop: "M6 6h8v8H6z",
  settings: "M3 6h9M16 6h1M3 14h1M8 14h9M12 4v4M6 12v4",
  attach: "M14 8l-5 5a2 2 0 01-3-3l6-6a3.2 3.2 0 014.5 4.5L10 15",
  auto: "M10 3a7 7 0 100 14zM10 3a7 7 0 010 14",
  light: "M10 7a3 3 0 100 6 3 3 0 000-6zM10 2v2M10 16v2M2 10h2M16 10h2M4.5 4.5l1.3 1.3M14.2 14.2l1.3 1.3M4.5 15.5l1.3-1.3M14.2 5.8l1.3-1.3",
  dark: "M16 12.5A7 7 0 017.5 4 7 7 0 1016 12.5z",
  chat: "M3 4h14v9H9l-4 3v-3H3z",
  models: "M10 2l7 4v8l-7 4-7-4V6zM3 6l7 4 7-4M10 10v8",
  dashboard: "M3 17V9M8 17V4M13 17v-6M18 17V7",
  copy: "M7 7h9v9H7zM4 13V4h9",
  again: "M16 10a6 6 0 11-2-4.5M16 3v4h-4",
  edit: "M4 16l1-4 8-8 3 3-8 8z",
  bin: "M4 6h12M8 6V4h4v2M6 6l1 11h6l1-11",
  pin: "M7 3h6l-1 5 3 3H5l3-3zM10 11v6",
  left: "M12 5l-5 5 5 5",
  right: "M8 5l5 5-5 5",
  info: "M10 3a7 7 0 100 14 7 7 0 000-14zM10 9v5M10 6v.5",
  help: "M7.5 7.5a2.5 2.5 0 115 0c0 2-2.5 2-2.5 4M10 15v.5",
};

export function Icon({ name }) {
  return (
    <svg class="icon" viewBox="0 0 20 20" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}

export function IconButton({ icon, label, ...rest }) {
  return (
    <button type="button" class="quiet" aria-label={label} title={label} {...rest}>
      <Icon name={icon} />
    </button>
  );
}

export function Dialog({ title, onClose, children, ...rest }) {
  const place = useRef();
  useEffect(() => {
    place.current.showModal();
  }, []);
  return (
    <dialog
      ref={place}
      {...rest}
      aria-label={title}
      onClose={onClose}
      onClick={(event) => event.target === place.current && place.current.close()}
    >
      <header>
        <h2>{title}</h2>
        <IconButton icon="close" label="Close" onClick={() => place.current.close()} />
      </header>
      {children}
    </dialog>
  );
}

// A share of a whole, as a bar and in words.
export function Meter({ label, value, of, text, parts }) {
  const shown = parts ?? [{ value, kind: "" }];
  return (
    <div class="meter">
      <div class="meter-text">
        <span>{label}</span>
        <span>{text}</span>
      </div>
      <svg viewBox="0 0 100 4" preserveAspectRatio="none" role="img" aria-label={`${label}: ${text}`}>
        <rect class="rest" width="100" height="4" />
        {bars(shown, of).map(({ x, width, kind }) => (
          <rect key={kind} class={`part ${kind}`} x={x} width={width} height="4" />
        ))}
      </svg>
    </div>
  );
}

function bars(parts, of) {
  let x = 0;
  return parts.map(({ value, kind }) => {
    const width = of > 0 ? Math.min((100 * value) / of, 100 - x) : 0;
    const bar = { x, width, kind };
    x += width;
    return bar;
  });
}
