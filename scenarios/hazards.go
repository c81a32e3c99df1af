package scenarios

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/tools/txtar"

	"github.com/fencelab/fencelab/scenarios/history"
)

//go:embed hazards
var embedded embed.FS

// Hazards returns all hazards, sorted by name.
func Hazards() []Scenario {
	folder, err := fs.Sub(embedded, "hazards")
	if err != nil {
		panic(err)
	}
	all, err := Load(folder)
	if err != nil {
		panic(err)
	}
	return all
}

// Hazard returns the hazard of that name.
func Hazard(name string) (Scenario, bool) {
	for _, s := range Hazards() {
		if s.Name == name {
			return s, true
		}
	}
	return Scenario{}, false
}

// Load parses all files *.txt of a folder, in the order of their names.
func Load(folder fs.FS) ([]Scenario, error) {
	files, err := fs.Glob(folder, "*.txt")
	if err == nil && len(files) == 0 {
		err = errors.New("scenarios: the folder has no file *.txt")
	}
	errs := []error{err}
	var all []Scenario
	for _, file := range files {
		text, err := fs.ReadFile(folder, file)
		if err == nil {
			var s Scenario
			if s, err = Parse(file, text); err == nil && len(s.Expect) == 0 {
				err = fmt.Errorf("scenarios: %s: it has no expected verdict; add a section such as %q", s.where(0), "-- on: safe --")
			}
			all = append(all, s)
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return all, nil
}

// Parse reads and checks a hazard, which it names after its file. The text is a sentence that says what happens, an empty line,
// settings, and the schedule:
//
//	locks redis etcd           these have the hazard; without the line, all
//	variant counters           see LockSpec
//	tokens-lost                see Scenario.TokensLost
//	min-ttl 3s                 see Scenario.MinTTL
//	worker A victim no-renew   the options are the fields of Worker
//	run A until read
//	pause A
//	# why
//
// Sections such as "-- on: safe --" have the verdict and the trace for a fencing mode; see Scenario.Traces for "-- unfenced --".
func Parse(file string, text []byte) (Scenario, error) {
	s := Scenario{
		Name: strings.TrimSuffix(path.Base(file), ".txt"), file: file, Workers: map[string]Worker{},
		Expect: map[history.Fencing]history.Verdict{}, Traces: map[string]string{}, lines: map[string]int{},
	}
	var errs []error
	text = bytes.TrimPrefix(text, []byte("\ufeff")) // as Windows editors write
	archive := txtar.Parse(bytes.ReplaceAll(text, []byte("\r\n"), []byte("\n")))
	n, sentence := 0, true
	check := func(err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", s.where(n), err))
		}
	}
	for line := range strings.Lines(string(archive.Comment)) {
		n++
		words := strings.Fields(line)
		switch {
		case len(words) > 0 && strings.HasPrefix(words[0], "#"):
		case sentence && s.Hazard != "" && len(words) > 0 && slices.Contains(keywords(), words[0]):
			check(fmt.Errorf("the sentence continues on a line that begins with %q, as settings and steps do; put an empty line before, or "+
				"break the sentence elsewhere", words[0]))
		case sentence && len(words) > 0:
			s.Hazard = strings.TrimSpace(s.Hazard + " " + strings.TrimSpace(line))
		case len(words) == 0:
			sentence = sentence && s.Hazard == ""
		default:
			check(s.line(words[0], words[1:], n))
		}
	}
	for _, section := range archive.Files {
		n++
		check(s.section(section.Name, string(section.Data), n))
		for line := range strings.Lines(string(section.Data)) {
			if n++; strings.HasPrefix(strings.TrimSpace(line), "--") {
				check(fmt.Errorf("%q doesn't begin a section; %q, for example, does", strings.TrimSpace(line), "-- on: safe --"))
			}
		}
	}
	if len(errs) == 0 {
		return s, s.Check()
	}
	return s, fmt.Errorf("scenarios: %w", errors.Join(errs...))
}

// Format returns the text that [Parse] reads, without comments.
func Format(s Scenario) []byte {
	var b strings.Builder
	line := func(words ...string) { b.WriteString(strings.Join(words, " ") + "\n") }
	line(s.Hazard + "\n")
	if len(s.Locks) > 0 {
		line("locks", strings.Join(s.Locks, " "))
	}
	if s.Variant != "" {
		line("variant", s.Variant)
	}
	if s.TokensLost {
		line("tokens-lost")
	}
	if s.MinTTL > 0 {
		line("min-ttl", time.Duration(s.MinTTL).String())
	}
	for _, name := range slices.Sorted(maps.Keys(s.Workers)) {
		w := s.Workers[name]
		words := []string{"worker", name}
		flags := w.flags()
		for _, option := range slices.Sorted(maps.Keys(flags)) {
			if *flags[option] {
				words = append(words, option)
			}
		}
		if w.MaxHold > 0 {
			words = append(words, "max-hold="+time.Duration(w.MaxHold).String())
		}
		line(words...)
	}
	for _, st := range s.Steps {
		line(st.String())
	}
	archive := txtar.Archive{Comment: []byte(b.String())}
	for _, mode := range []string{string(history.FencingOff), string(history.FencingWrites), string(history.FencingOn), unfenced} {
		trace, ok := s.Traces[mode]
		if v, expected := s.Expect[history.Fencing(mode)]; expected {
			mode += ": " + v.String()
		}
		if ok {
			archive.Files = append(archive.Files, txtar.File{Name: mode, Data: []byte(trace)})
		}
	}
	return txtar.Format(&archive)
}

func (s *Scenario) where(line int) string {
	if s.file == "" {
		return s.Name
	}
	return fmt.Sprintf("%s:%d", s.file, max(line, 1))
}

var settings = []string{"locks", "variant", "tokens-lost", "min-ttl", "worker"}

func keywords() []string {
	names := append(slices.Clone(settings), verbRun)
	for _, f := range history.Faults {
		names = append(names, f.Name)
	}
	return names
}

func (s *Scenario) line(first string, rest []string, n int) (err error) {
	one := func() (string, error) {
		if len(rest) != 1 {
			return "", fmt.Errorf("%s takes one value, not %d", first, len(rest))
		}
		return rest[0], nil
	}
	given := map[string]bool{"locks": s.Locks != nil, "variant": s.Variant != "", "tokens-lost": s.TokensLost, "min-ttl": s.MinTTL != 0}
	if given[first] {
		return fmt.Errorf("duplicate line %q", first)
	}
	switch first {
	case "locks":
		if s.Locks = rest; len(rest) == 0 {
			return errors.New("it names no lock; remove the line if every lock has the hazard")
		}
	case "variant":
		s.Variant, err = one()
	case "tokens-lost":
		if s.TokensLost = true; len(rest) > 0 {
			return errors.New("tokens-lost takes no value")
		}
	case "min-ttl":
		s.lines[first] = n
		text, err := one()
		if err != nil {
			return err
		}
		return s.MinTTL.UnmarshalText([]byte(text))
	case "worker":
		if len(rest) == 0 {
			return errors.New("it names no worker")
		}
		if _, ok := s.Workers[rest[0]]; ok {
			return fmt.Errorf("worker %s is already declared; put all its options on that line", rest[0])
		}
		s.lines["worker "+rest[0]] = n
		s.Workers[rest[0]], err = parseWorker(rest[1:])
	default:
		var st Step
		st, err = parseStep(first, rest)
		st.line = n
		s.Steps = append(s.Steps, st)
	}
	return err
}

func (w *Worker) flags() map[string]*bool {
	return map[string]*bool{
		"victim": &w.Victim, "no-renew": &w.NoRenew, "check": &w.Check, "try": &w.Try, "idle": &w.Idle, "outlive": &w.Outlive,
		"second": &w.Second, "get-then-del": &w.GetThenDel,
	}
}

func parseWorker(options []string) (w Worker, err error) {
	flags := w.flags()
	for _, option := range options {
		if d, ok := strings.CutPrefix(option, "max-hold="); ok {
			if w.MaxHold != 0 {
				return w, errors.New("duplicate max-hold")
			}
			if err := w.MaxHold.UnmarshalText([]byte(d)); err != nil {
				return w, err
			}
			continue
		}
		flag := flags[option]
		if flag == nil {
			return w, fmt.Errorf("unknown worker option %q; the options are %s and max-hold=%v",
				option, strings.Join(slices.Sorted(maps.Keys(flags)), ", "), time.Hour)
		}
		*flag = true
	}
	return w, nil
}

func parseStep(verb string, rest []string) (Step, error) {
	st := Step{Verb: verb}
	if len(rest) > 0 {
		st.Target, rest = rest[0], rest[1:]
	}
	switch {
	case len(rest) == 2 && rest[0] == "until":
		st.Until = rest[1]
	case len(rest) > 1 && rest[0] == "from":
		st.From = rest[1:]
	case len(rest) == 1:
		st.Detail = rest[0]
	case len(rest) > 1:
		return st, fmt.Errorf("unexpected %q after %s; want until and a report, from and servers, or one word", strings.Join(rest, " "), st.Target)
	}
	return st, nil
}

const unfenced = "unfenced"

func (s *Scenario) section(title, trace string, n int) error {
	mode, text, _ := strings.Cut(title, ": ")
	if _, ok := s.Traces[mode]; ok {
		return fmt.Errorf("duplicate section %q", mode)
	}
	s.Traces[mode], s.lines["-- "+mode] = trace, n
	if title == unfenced {
		return nil
	}
	var v history.Verdict
	if err := v.UnmarshalText([]byte(text)); err != nil {
		return fmt.Errorf("section %q is not a fencing mode and a verdict, as in %q: %w", title, "on: safe", err)
	}
	s.Expect[history.Fencing(mode)] = v
	return nil
}
