// Package eachcall lists a store's calls, for tests that expect the same of each.
package eachcall

import (
	"context"

	"github.com/fencelab/fencelab/resource"
)

// Of returns the calls of s on key, optional ones included, by their names, with the fence f and, in writes, a value.
func Of(s resource.Store, key string, f resource.Fence) map[string]func(context.Context) error {
	calls := map[string]func(context.Context) error{
		"Write":      func(ctx context.Context) error { return s.Write(ctx, key, f, []byte("v")) },
		"Read":       func(ctx context.Context) error { _, err := s.Read(ctx, key); return err },
		"ReadFenced": func(ctx context.Context) error { _, err := s.ReadFenced(ctx, key, f); return err },
	}
	if setter, ok := s.(resource.FenceSetter); ok {
		calls["SetFence"] = func(ctx context.Context) error { return setter.SetFence(ctx, key, f.Token) }
	}
	if over, ok := s.(resource.Overwriter); ok {
		calls["Overwrite"] = func(ctx context.Context) error { return over.Overwrite(ctx, key, f, []byte("v")) }
	}
	return calls
}
