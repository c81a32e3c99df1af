package stores

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/fencelab/fencelab/resource/dynamostore"
	"github.com/fencelab/fencelab/resource/s3store"
)

// services are the schemes after "s3+" or "dynamodb+"; none: Amazon's own.
var services = []string{"", "http", "https"}

// awsConfig takes credentials from u or the environment.
func awsConfig(u *url.URL, service string, o Options) (config aws.Config, name string, d *dialer, closeIdle func() error, err error) {
	d = &dialer{}
	client, transport := httpClient(d, o.Fresh)
	config = aws.Config{
		Region: cmp.Or(os.Getenv("AWS_REGION"), "us-east-1"), HTTPClient: client,
		// A write is sent once: the SDK would retry when a hazard breaks the connection.
		Retryer: func() aws.Retryer { return aws.NopRetryer{} },
	}
	name = u.Host
	if service != "" {
		name = strings.Trim(u.Path, "/")
		config.BaseEndpoint = aws.String(service + "://" + u.Host)
	}
	if name == "" || strings.Contains(name, "/") || u.Host == "" || u.RawQuery != "" || service == "" && strings.Trim(u.Path, "/") != "" {
		return config, "", nil, nil, fmt.Errorf("stores: the address of %s names no bucket or table; there are %s", u.Redacted(), Addresses)
	}
	id, secret := u.User.Username(), ""
	session := ""
	if u.User != nil {
		secret, _ = u.User.Password()
	} else {
		id, secret, session = os.Getenv("AWS_ACCESS_KEY_ID"), os.Getenv("AWS_SECRET_ACCESS_KEY"), os.Getenv("AWS_SESSION_TOKEN")
	}
	if id == "" || secret == "" {
		return config, "", nil, nil, fmt.Errorf("stores: there are no credentials for %s: put them into the address, or set "+
			"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", u.Redacted())
	}
	config.Credentials = credentials.NewStaticCredentialsProvider(id, secret, session)
	return config, name, d, func() error { transport.CloseIdleConnections(); return nil }, nil
}

func openS3(ctx context.Context, u *url.URL, service string, o Options) (*Store, error) {
	config, bucket, d, closeIdle, err := awsConfig(u, service, o)
	if err != nil {
		return nil, err
	}
	client := s3.NewFromConfig(config, func(o *s3.Options) { o.UsePathStyle = service != "" })
	open := s3store.Open
	if o.Prepared {
		open = func(_ context.Context, c *s3.Client, bucket string, opts *s3store.Options) (*s3store.Store, error) {
			return s3store.New(c, bucket, opts)
		}
	} else if err := createBucket(ctx, client, bucket, config.Region); err != nil {
		return nil, errors.Join(err, closeIdle())
	}
	s, err := open(ctx, client, bucket, nil)
	return opened(S3, s, err, d, closeIdle)
}

func createBucket(ctx context.Context, c *s3.Client, bucket, region string) error {
	if _, err := c.HeadBucket(ctx, &s3.HeadBucketInput{Bucket: &bucket}); err == nil {
		return nil
	}
	in := &s3.CreateBucketInput{Bucket: &bucket}
	if region != "us-east-1" { // the default must not be named
		in.CreateBucketConfiguration = &types.CreateBucketConfiguration{LocationConstraint: types.BucketLocationConstraint(region)}
	}
	_, err := c.CreateBucket(ctx, in)
	_, exists := errors.AsType[*types.BucketAlreadyOwnedByYou](err) // created by another process meanwhile
	if err != nil && !exists {
		return fmt.Errorf("stores: create bucket %s: %w", bucket, err)
	}
	return nil
}

func openDynamoDB(ctx context.Context, u *url.URL, service string, o Options) (*Store, error) {
	config, table, d, closeIdle, err := awsConfig(u, service, o)
	if err != nil {
		return nil, err
	}
	client := dynamodb.NewFromConfig(config)
	if !o.Prepared {
		if err := dynamostore.CreateTable(ctx, client, table); err != nil {
			return nil, errors.Join(err, closeIdle())
		}
	}
	s, err := dynamostore.New(client, table)
	return opened(DynamoDB, s, err, d, closeIdle)
}
