// Package site makes charts and tables of the recorded results, and a site of all pages, from the data alone. The data must have
// all runs that goals and titles name.
package site

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

var sources = []struct {
	dir, data string
	derive    func(data []byte) (*derived, error)
}{
	{"contention", "data.jsonl", contention},
	{"fairness", "data.jsonl", fairness},
	{"holder-killed", "runs.jsonl", blocked},
	{"ten-million-keys", "data.jsonl", memory},
	{"token-costs", "data.jsonl", tokens},
	{"compare-and-swap", "bench.txt", updates},
	{"store-costs", "bench.txt", storeCosts},
}

// Files are contents by path relative to a folder, with slashes.
type Files map[string][]byte

// Pages returns the charts and the pages' tables, made from the data in the results folder. Results without data are skipped.
func Pages(results fs.FS) (Files, error) {
	out := Files{}
	for _, s := range sources {
		data, err := fs.ReadFile(results, path.Join(s.dir, s.data))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		d, err := s.derive(data)
		if err != nil {
			return nil, fmt.Errorf("%s/%s: %w", s.dir, s.data, err)
		}
		for name, c := range d.charts {
			out[path.Join(s.dir, name+".svg")] = c.svg(s.dir + "-" + name)
		}
		if len(d.tables) == 0 {
			continue
		}
		file := path.Join(s.dir, "README.md")
		page, err := fs.ReadFile(results, file)
		if err != nil {
			return nil, err
		}
		if out[file], err = fill(page, d.tables); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	return out, nil
}

// fill puts the tables between the comments that name them. Each must have a place, and each place a table.
func fill(page []byte, tables map[string]string) ([]byte, error) {
	var b strings.Builder
	rest := string(page)
	placed := map[string]bool{}
	for {
		before, after, ok := strings.Cut(rest, "<!-- report: ")
		b.WriteString(before)
		if !ok {
			break
		}
		name, after, _ := strings.Cut(after, " -->\n")
		text, known := tables[name]
		if !known {
			return nil, fmt.Errorf("the data has no table %q; it has %s", name, strings.Join(slices.Sorted(maps.Keys(tables)), ", "))
		}
		end := "<!-- end report: " + name + " -->"
		_, after, ok = strings.Cut(after, end)
		if !ok {
			return nil, fmt.Errorf("after <!-- report: %s --> there is no %s", name, end)
		}
		b.WriteString("<!-- report: " + name + " -->\n" + text + end)
		placed[name], rest = true, after
	}
	for _, name := range slices.Sorted(maps.Keys(tables)) {
		if !placed[name] {
			return nil, fmt.Errorf("the page has no place for the table %q: <!-- report: %s -->", name, name)
		}
	}
	return []byte(b.String()), nil
}

// Write writes the files into a folder, and returns how many differed. It removes no other files.
func (f Files) Write(dir string) (changed int, err error) {
	for name, b := range f {
		file := filepath.Join(dir, filepath.FromSlash(name))
		if old, err := os.ReadFile(file); err == nil && bytes.Equal(old, b) {
			continue
		}
		changed++
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return changed, err
		}
		if err := os.WriteFile(file, b, 0o644); err != nil {
			return changed, err
		}
	}
	return changed, nil
}
