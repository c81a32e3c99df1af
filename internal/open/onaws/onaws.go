// Package onaws reads the addresses of buckets and tables, on Amazon's or compatible servers.
package onaws

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
)

// The schemes of addresses, SCHEME://[ID:SECRET@]NAME?endpoint=URL&region=NAME. A bucket's NAME may be BUCKET/PREFIX.
const (
	S3       = "s3"
	DynamoDB = "dynamodb"
)

// On returns the address of a bucket or table on the server at a URL.
func On(scheme, name, server string) string {
	u, err := url.Parse(server)
	if err != nil {
		return server // Config refuses it
	}
	to := url.URL{Scheme: scheme, User: u.User, Host: name, RawQuery: "endpoint=" + u.Scheme + "://" + u.Host}
	return to.String()
}

// Config returns u's configuration, completed from the environment. Errors don't quote u, which may hold a secret.
func Config(u *url.URL, client *http.Client) (aws.Config, error) {
	q := u.Query()
	config := aws.Config{Region: cmp.Or(q.Get("region"), os.Getenv("AWS_REGION"), "us-east-1"), HTTPClient: client}
	if endpoint := q.Get("endpoint"); endpoint != "" {
		config.BaseEndpoint = &endpoint
		at, err := url.Parse(endpoint)
		if err != nil || at.Scheme != "http" && at.Scheme != "https" || at.Host == "" || at.User != nil {
			return config, errors.New("the endpoint of " + u.Scheme + " is not of the form http://HOST:PORT or https://HOST:PORT")
		}
	}
	q.Del("region")
	q.Del("endpoint")
	if u.Host == "" || len(q) > 0 || u.Scheme == DynamoDB && strings.Trim(u.Path, "/") != "" {
		return config, fmt.Errorf("the %s address is not of the form %s://[ID:SECRET@]NAME?endpoint=URL&region=NAME", u.Scheme, u.Scheme)
	}
	id, secret, session := u.User.Username(), "", ""
	if u.User != nil {
		secret, _ = u.User.Password()
	} else {
		id, secret, session = os.Getenv("AWS_ACCESS_KEY_ID"), os.Getenv("AWS_SECRET_ACCESS_KEY"), os.Getenv("AWS_SESSION_TOKEN")
	}
	if id == "" || secret == "" {
		return config, fmt.Errorf("there are no credentials for %s: put them into the address, or set "+
			"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", u.Redacted())
	}
	config.Credentials = credentials.NewStaticCredentialsProvider(id, secret, session)
	return config, nil
}

// Bucket is an address's bucket.
type Bucket struct {
	Client *s3.Client
	Name   string
	Prefix string // empty, or ends with a slash
	region string
}

// OpenBucket sends nothing.
func OpenBucket(u *url.URL, config aws.Config) Bucket {
	client := s3.NewFromConfig(config, func(o *s3.Options) {
		o.UsePathStyle, o.DisableLogOutputChecksumValidationSkipped = config.BaseEndpoint != nil, true
	})
	prefix := strings.Trim(u.Path, "/")
	if prefix != "" {
		prefix += "/"
	}
	return Bucket{client, u.Host, prefix, config.Region}
}

// Check returns an error if the bucket doesn't exist or the server doesn't reply.
func (b Bucket) Check(ctx context.Context) error {
	_, err := b.Client.HeadBucket(ctx, &s3.HeadBucketInput{Bucket: &b.Name})
	if _, missing := errors.AsType[*types.NotFound](err); missing {
		return fmt.Errorf("there is no bucket %s; 'aws s3 mb s3://%s' creates it: %w", b.Name, b.Name, err)
	}
	return err
}

// Create creates the bucket, unless it exists.
func (b Bucket) Create(ctx context.Context) error {
	if b.Check(ctx) == nil {
		return nil
	}
	in := &s3.CreateBucketInput{Bucket: &b.Name}
	if b.region != "us-east-1" { // the default must not be named
		in.CreateBucketConfiguration = &types.CreateBucketConfiguration{LocationConstraint: types.BucketLocationConstraint(b.region)}
	}
	_, err := b.Client.CreateBucket(ctx, in)
	_, exists := errors.AsType[*types.BucketAlreadyOwnedByYou](err) // by another process meanwhile
	if err != nil && !exists {
		return fmt.Errorf("create bucket %s: %w", b.Name, err)
	}
	return nil
}
