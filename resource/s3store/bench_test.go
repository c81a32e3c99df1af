package s3store_test

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource/internal/awstest"
	"github.com/fencelab/fencelab/resource/internal/storebench"
	"github.com/fencelab/fencelab/resource/s3store"
)

// go test -run '^$' -bench . ./resource/s3store

func onServer(b *testing.B, run func(b *testing.B, ways []storebench.Way)) {
	b.Helper()
	b.Run("store=s3", func(b *testing.B) {
		l := &awstest.Link{}
		client := newClient(endpoint, l)
		if os.Getenv("FENCELAB_S3_ENDPOINT") == "" {
			_, client = startVersity(b, l)
		}
		s, err := s3store.Open(b.Context(), client, bucket, &s3store.Options{Prefix: newPrefix()})
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, s.Close()) })
		run(b, storebench.Ways(s, make([]byte, 128), l.Total))
	})
}

func BenchmarkFenceCheck(b *testing.B) { onServer(b, storebench.FenceCheck) }

func BenchmarkWriters(b *testing.B) { onServer(b, storebench.Writers) }
