package s3store_test

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource/s3store"
	"github.com/fencelab/fencelab/resource/storetest"
)

// The benchmarks compare a fenced write with one that doesn't look at the fence, and count requests, on a versitygw or the
// server of FENCELAB_S3_ENDPOINT:
//
//	go test -run '^$' -bench . ./resource/s3store

func onServer(b *testing.B, run func(b *testing.B, ways []storetest.Way)) {
	b.Helper()
	b.Run("store=s3", func(b *testing.B) {
		l := newLink()
		client := newClient(endpoint, l)
		if os.Getenv("FENCELAB_S3_ENDPOINT") == "" {
			_, client = startVersity(b, l)
		}
		s, err := s3store.Open(b.Context(), client, bucket, &s3store.Options{Prefix: newPrefix()})
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, s.Close()) })
		run(b, storetest.Ways(s, make([]byte, 128), func() (n int) {
			for _, sent := range l.sent() {
				n += sent
			}
			return n
		}))
	})
}

func BenchmarkFenceCheck(b *testing.B) { onServer(b, storetest.BenchFenceCheck) }

func BenchmarkWriters(b *testing.B) { onServer(b, storetest.BenchWriters) }
