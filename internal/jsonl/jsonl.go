// Package jsonl reads and writes lines of JSON.
package jsonl

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Decode reads all lines of r. If strict, fields that T lacks are errors. Errors name the line.
func Decode[T any](r io.Reader, strict bool) (all []T, err error) {
	dec := json.NewDecoder(r)
	if strict {
		dec.DisallowUnknownFields()
	}
	for {
		var x T
		switch err := dec.Decode(&x); {
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return nil, fmt.Errorf("line %d: %w", len(all)+1, err)
		}
		all = append(all, x)
	}
}

// Encode writes a line for each value.
func Encode[T any](w io.Writer, all ...T) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	for i := range all {
		if err := enc.Encode(&all[i]); err != nil {
			return err
		}
	}
	return nil
}
