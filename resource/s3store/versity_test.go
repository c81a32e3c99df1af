package s3store_test

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"testing"

	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/s3store"
	"github.com/fencelab/fencelab/resource/storetest"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func startVersity(tb testing.TB, rt http.RoundTripper) (*testbed.Server, *s3.Client) {
	tb.Helper()
	ctx := context.Background()
	server := testmain.Serve(tb, testbed.StartS3, nil)
	tb.Cleanup(transport.CloseIdleConnections)
	u, err := url.Parse(server.URL)
	require.NoError(tb, err)
	c := newClient((&url.URL{Scheme: u.Scheme, Host: u.Host}).String(), rt, func(o *s3.Options) {
		secret, _ := u.User.Password()
		o.Credentials = credentials.NewStaticCredentialsProvider(u.User.Username(), secret, "")
	})
	_, err = c.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: &bucket})
	require.NoError(tb, err)
	return server, c
}

func TestStoreOnVersity(t *testing.T) {
	server, client := startVersity(t, transport)
	if server.Provider == testbed.External {
		t.Skip("an external server is not ours to kill")
	}
	var prefix string
	open := func() (resource.Store, error) {
		return s3store.Open(t.Context(), client, bucket, &s3store.Options{Prefix: prefix})
	}
	storetest.Run(t, storetest.Harness{
		New: func() (resource.Store, error) {
			prefix = newPrefix()
			return open()
		},
		Reopen: func(s resource.Store) (resource.Store, error) {
			if err := errors.Join(s.Close(), server.Kill(t.Context())); err != nil {
				return nil, err
			}
			if err := server.Restart(t.Context()); err != nil {
				return nil, err
			}
			return open()
		},
		Another: open,
	})
}
