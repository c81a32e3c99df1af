package locks

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/fencelab/fencelab/dlock/s3lock"
	"github.com/fencelab/fencelab/internal/http1"
	"github.com/fencelab/fencelab/internal/open/onaws"
)

// openS3 also takes a server's address, and then creates the bucket "locks" on it.
func openS3(ctx context.Context, s Spec) (*Backend, error) {
	addr, err := s.one()
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(addr)
	server := err == nil && (u.Scheme == "http" || u.Scheme == "https") && strings.Trim(u.Path, "/") == ""
	if server {
		u, err = url.Parse(onaws.On(onaws.S3, "locks", addr))
	}
	if err != nil || u.Scheme != onaws.S3 { // it may hold a secret
		return nil, errors.New("locks: the S3 address is not like s3://[ID:SECRET@]BUCKET[/PREFIX]?endpoint=URL&region=NAME or http://ID:SECRET@HOST:PORT")
	}
	transport := http1.Transport()
	if s.Dial != nil {
		transport.DialContext = s.Dial
	}
	config, err := onaws.Config(ctx, u, &http.Client{Transport: transport})
	if err != nil {
		return nil, fmt.Errorf("locks: %w", err)
	}
	bucket := onaws.OpenBucket(u, config)
	owns := client{ping: bucket.Check, close: func() error { transport.CloseIdleConnections(); return nil }}
	prepare := bucket.Check
	if server {
		prepare = bucket.Create
	}
	if err := prepare(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("locks: %w", err), owns.close())
	}
	o := &s3lock.Options{Prefix: bucket.Prefix + "lock/"}
	if config.BaseEndpoint == nil { // Amazon's servers honour conditions: 20 requests fewer
		b, err := s3lock.New(bucket.Client, bucket.Name, o)
		return opened(b, err, owns)
	}
	b, err := s3lock.Open(ctx, bucket.Client, bucket.Name, o)
	return opened(b, err, owns)
}
