// Package site makes charts and tables of the recorded results, and a site of all pages, from the data alone. The data must have
// all runs that goals and titles name.
package site

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
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

// Derive returns the charts, and tables by folder and name, made from the data in the results folder. Results without data are
// skipped.
func Derive(results fs.FS) (charts Files, tables map[string]map[string]string, err error) {
	charts, tables = Files{}, map[string]map[string]string{}
	for _, s := range sources {
		data, err := fs.ReadFile(results, path.Join(s.dir, s.data))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		d, err := s.derive(data)
		if err != nil {
			return nil, nil, fmt.Errorf("%s/%s: %w", s.dir, s.data, err)
		}
		for name, c := range d.charts {
			charts[path.Join(s.dir, name+".svg")] = c.svg(s.dir + "-" + name)
		}
		tables[s.dir] = d.tables
	}
	return charts, tables, nil
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
