package boltstore_test

import (
	"context"
	"net/http/httptest"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/boltstore"
	"github.com/fencelab/fencelab/resource/internal/storebench"
)

// go test -run '^$' -bench . -benchmem ./resource/boltstore

var value = make([]byte, 128)

func stores(b *testing.B, run func(b *testing.B, ways []storebench.Way)) {
	b.Helper()
	b.Run("store=memory", func(b *testing.B) { run(b, storebench.Ways(resource.NewMemory(), value, nil)) })
	b.Run("store=bolt", func(b *testing.B) { run(b, storebench.Ways(openBench(b), value, nil)) })
	b.Run("store=http", func(b *testing.B) {
		s := openBench(b)
		run(b, storebench.Ways(overHTTP{
			Store:    served(b, s, nil, nil),
			unfenced: served(b, s, &resource.HandlerOptions{Unfenced: true}, &resource.ClientOptions{AllowUnfenced: true}),
		}, value, nil))
	})
}

func openBench(b *testing.B) *boltstore.Store {
	b.Helper()
	s, err := boltstore.Open(filepath.Join(b.TempDir(), "resource.db"), nil)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, s.Close()) })
	return s
}

type overHTTP struct {
	resource.Store
	unfenced *resource.Client
}

func (o overHTTP) Overwrite(ctx context.Context, key string, f resource.Fence, value []byte) error {
	return o.unfenced.Write(ctx, key, f, value)
}

func served(b *testing.B, s resource.Store, h *resource.HandlerOptions, c *resource.ClientOptions) *resource.Client {
	b.Helper()
	handler, err := resource.NewHandler(s, h)
	require.NoError(b, err)
	server := httptest.NewServer(handler)
	b.Cleanup(server.Close)
	client, err := resource.NewClient(server.URL, c)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, client.Close()) })
	return client
}

func BenchmarkFenceCheck(b *testing.B) { stores(b, storebench.FenceCheck) }

func BenchmarkWriters(b *testing.B) { stores(b, storebench.Writers) }
